"""``kimicore precision``: which precision each module of a model would have."""

from __future__ import annotations

import argparse

from kimicore.cli.options import policy_settings
from kimicore.policies.precision.named import map_names, policy_named, resolved_by

__all__ = ["add_parser", "run"]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("precision", help="print the precision that a map gives to each module of a model")
    parser.add_argument("model", help="alias, folder, GGUF file or hub id")
    built_in = ", ".join(map_names())
    parser.add_argument("--precision", default="asymmetric", help=f"{built_in}, or an installed policy's name")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the policy; values may be JSON"
    )
    parser.add_argument("--json", action="store_true", help="print the map as JSON instead of a table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    policy = policy_named(options.precision, policy_settings(options.set))
    from kimicore.model.load import open_source  # torch: only once the settings are known to be right
    from kimicore.model.modules import modules_of
    from kimicore.model.spec import spec_from_config

    modules = modules_of(spec_from_config(open_source(options.model).config))
    found = resolved_by(policy, modules)
    print(found.to_json() if options.json else found.table())
    return 0
