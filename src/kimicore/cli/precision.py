"""``kimicore precision``: which precision each module of a model would have."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, TypeVar

from kimicore.cli.options import policy_settings
from kimicore.contracts import ModuleView, PrecisionRules
from kimicore.errors import ConfigError, KimiCoreError, PluginError
from kimicore.guard import RAISED
from kimicore.plugins import KINDS, resolve
from kimicore.policies.precision import ActivationPrecision, ResolvedMap, resolve_precision

__all__ = ["add_parser", "run"]

Answer = TypeVar("Answer")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("precision", help="print the precision that a map gives to each module of a model")
    parser.add_argument("model", help="alias, folder, GGUF file or hub id")
    built_in = ", ".join(KINDS["precision"])
    parser.add_argument("--precision", default="asymmetric", help=f"{built_in}, or an installed policy's name")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the policy; values may be JSON"
    )
    parser.add_argument("--json", action="store_true", help="print the map as JSON instead of a table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    policy = resolve("precision", options.precision, policy_settings(options.set))
    from kimicore.model.load import open_source  # torch: only once the settings are known to be right
    from kimicore.model.modules import modules_of
    from kimicore.model.spec import spec_from_config

    modules = modules_of(spec_from_config(open_source(options.model).config))
    found = _resolved(policy, modules)
    print(found.to_json() if options.json else found.table())
    return 0


def _resolved(policy: Any, modules: Sequence[ModuleView]) -> ResolvedMap:
    """Return the policy's map; raises :class:`~kimicore.PluginError` where it raises or answers with something else."""
    rules = _answer(policy, "rules", PrecisionRules, modules)
    wanted = None
    if getattr(policy, "activation_precision", None) is not None:
        wanted = _answer(policy, "activation_precision", ActivationPrecision)
    try:
        return resolve_precision(rules, modules, wanted)
    except KimiCoreError:
        raise
    except Exception as error:
        raise PluginError(f"precision={policy.name!r}: {rules!r} cannot be applied: {error!r}") from error


def _answer(policy: Any, method: str, kind: type[Answer], *given: Any) -> Answer:
    try:
        answer = getattr(policy, method)(*given)
    except ConfigError:
        raise
    except RAISED as error:
        raise PluginError(f"precision={policy.name!r}: {method}() failed: {error!r}") from error
    if not isinstance(answer, kind):
        raise PluginError(f"precision={policy.name!r}: {method}() answered {answer!r}, which is no {kind.__name__}")
    return answer
