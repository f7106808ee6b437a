"""``kimicore verify``: whether a quantized, pruned or converted model still says what its baseline says."""

from __future__ import annotations

import argparse
from pathlib import Path

from kimicore.cli.options import (
    Progress,
    add_activations_option,
    add_skip_layers_option,
    check_writable,
    policy_settings,
    skipped_layers,
)
from kimicore.errors import ConfigError

__all__ = ["add_parser", "run"]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("verify", help="compare a quantized or changed model with its baseline")
    parser.add_argument("baseline", help="alias, folder, GGUF file or hub id; computed in float32")
    parser.add_argument("candidate", nargs="?", help="another one; left out: the baseline, loaded otherwise")
    parser.add_argument("--prompts", type=int, default=200, metavar="N", help="prompts, evenly by category (200)")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="tokens of each continuation (64)")
    parser.add_argument("--text", action="append", default=[], metavar="FILE", help="own texts; may be repeated")
    parser.add_argument("--dtype", default="float32", help="of the candidate: float32, bfloat16, float16 or auto")
    parser.add_argument("--precision", default="stored", metavar="NAME", help="precision map of the candidate at load")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of that map")
    add_skip_layers_option(parser)
    add_activations_option(parser)
    parser.add_argument("--metric", default="agreement", choices=("agreement", "edit"), help="what the verdict goes by")
    parser.add_argument("--no-edit", action="store_true", help="let no model continue by itself but the baseline")
    parser.add_argument("--no-noise", action="store_true", help="leave out the baseline in bfloat16")
    parser.add_argument("--no-keep", action="store_true", help="write no report beside the candidate's weights")
    parser.add_argument("--json", metavar="OUT", help="write the report there; - is standard output")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress on standard error")
    parser.set_defaults(run=run, verdict=True)


def run(options: argparse.Namespace) -> int:
    """Run the command and return 0 where the candidate passes, else 1."""
    if options.json not in (None, "-"):
        check_writable(options.json)
    policy, skipped = policy_settings(options.set), skipped_layers(options)
    if policy and options.precision in ("stored", "none"):
        raise ConfigError(f"--set goes with --precision and the name of a map, not with {options.precision!r}")
    from kimicore.verify import verify  # torch: only once the options are known to be right

    progress = Progress(options.quiet)
    try:
        report = verify(
            options.baseline,
            options.candidate,
            prompts=options.prompts,
            new_tokens=options.tokens,
            dtype=options.dtype,
            precision=options.precision,
            policy=policy,
            skip_layers=skipped,
            activations=options.activations,
            metric=options.metric,
            texts=options.text,
            edit=not options.no_edit,
            noise=not options.no_noise,
            keep=not options.no_keep,
            threads=options.threads,
            progress=progress,
        )
    finally:
        progress.clear()
    if options.json == "-":
        print(report.to_json())
    else:
        print(report.table())
        if options.json is not None:
            report.write(Path(options.json))
    return 0 if report.passed else 1
