"""``kimicore quantize``: round a model's weights and write them as a model folder."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from kimicore.cli.options import Progress, policy_settings
from kimicore.errors import ConfigError
from kimicore.policies.precision.named import map_names, policy_named, resolved_by, smaller_groups

if TYPE_CHECKING:
    from kimicore.policies.precision.resolving import ResolvedMap
    from kimicore.quantize.methods import QuantizeSettings
    from kimicore.quantize.run import Quantized

__all__ = ["add_parser", "run"]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("quantize", help="round a model's weights and write them as a model folder")
    parser.add_argument("model", help="alias, folder, GGUF file or hub id")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write; the model loads from it")
    names = ", ".join(map_names())
    parser.add_argument("--map", default="asymmetric", help=f"{names}, or an installed policy's name")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the map; values may be JSON"
    )
    parser.add_argument("--method", default="gptq", help="nearest, awq, gptq or awq-gptq (default gptq)")
    parser.add_argument("--samples", type=int, default=64, metavar="N", help="sequences to calibrate on (default 64)")
    parser.add_argument("--sample-tokens", type=int, default=256, metavar="N", help="tokens of each (default 256)")
    parser.add_argument("--damping", type=float, default=0.01, help="steadies error compensation (default 0.01)")
    parser.add_argument("--no-act-order", action="store_true", help="round columns in their own order")
    parser.add_argument("--ladder", action="store_true", help="verify, and climb to finer precisions until it passes")
    parser.add_argument("--prompts", type=int, metavar="N", help="of that verifying (default 100)")
    parser.add_argument(
        "--steps-down", type=int, metavar="N", help="smaller maps tried after the first pass (default 2)"
    )
    parser.add_argument(
        "--keep-failed", action="store_true", help="write what the ladder ends with whether it passes or not"
    )
    parser.add_argument("--strict", action="store_true", help="no smaller groups where the map's do not fit")
    parser.add_argument("--overwrite", action="store_true", help="replace DIR, or an interrupted run of another kind")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress on standard error")
    parser.set_defaults(run=run, verdict=True)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    settings = policy_settings(options.set, example="ffn=int8")
    if options.strict:
        settings["strict"] = True
    policy = policy_named(options.map, settings)
    if options.threads is not None and options.threads < 1:
        raise ConfigError(f"--threads={options.threads}: must be at least 1")
    given = {
        "--prompts": options.prompts,
        "--steps-down": options.steps_down,
        "--keep-failed": options.keep_failed or None,
    }
    for name, value in given.items():
        if value is not None and not options.ladder:
            raise ConfigError(f"{name}: goes with --ladder")
    import torch

    from kimicore.model.load import open_source
    from kimicore.model.modules import modules_of
    from kimicore.model.spec import spec_from_config
    from kimicore.quantize.methods import QuantizeSettings
    from kimicore.quantize.run import quantize_model

    how = QuantizeSettings(
        method=options.method,
        samples=options.samples,
        sample_tokens=options.sample_tokens,
        damping=options.damping,
        act_order=not options.no_act_order,
    )
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    source = open_source(options.model)
    found = resolved_by(policy, modules_of(spec_from_config(source.config)))
    for note in smaller_groups(policy, found):
        print(f"kimicore: {note}", file=sys.stderr)
    progress = Progress(options.quiet)
    if options.ladder:
        return _climb(options, found, how, progress)
    made = quantize_model(source, options.out, found, how, overwrite=options.overwrite, progress=progress)
    progress.clear()
    _show(made, found, how)
    return 0


def _show(made: Quantized, found: ResolvedMap, how: QuantizeSettings) -> None:
    print(found.table().partition("\n\n")[2])
    print(f"{made.folder}: {made.weight_bytes:,} bytes of weights, {how.method.name}", end="")
    print(f"; {made.ffn_share:.1%} of the feed-forward weights are under 16 bits")


def _climb(options: argparse.Namespace, found: ResolvedMap, how: QuantizeSettings, progress: Progress) -> int:
    """Quantize with the ladder and return 0 where the model is quantizable, else 1."""
    from kimicore.quantize.judge import Judge
    from kimicore.quantize.ladder import LEAST_SHARE, STEPS_DOWN, Rung, check_climb, climb

    def told(rung: Rung) -> None:
        progress.clear()
        verdict = "pass" if rung.passed else "not yet"
        print(
            f"agreement {rung.agreement:.2%}, KL {rung.kl:.5f}, {rung.weight_bytes:,} bytes, "
            f"{rung.ffn_share:.1%} of the feed-forward weights under 16 bits: {verdict}",
            flush=True,
        )

    prompts = 100 if options.prompts is None else options.prompts
    steps_down = STEPS_DOWN if options.steps_down is None else options.steps_down
    check_climb(options.model, options.out, steps_down, options.overwrite)
    with Judge(options.model, prompts=prompts, threads=options.threads, progress=progress) as judge:
        end = climb(
            options.model,
            options.out,
            found,
            judge,
            how,
            overwrite=options.overwrite,
            keep_failed=options.keep_failed,
            steps_down=steps_down,
            progress=progress,
            told=told,
        )
    progress.clear()
    print(end.report.table())
    print(f"kept: map {end.kept + 1} of {len(end.rungs)}")
    if end.written is not None:
        _show(end.written, end.found, how)
    if not end.quantizable:
        share = f"{end.rung.ffn_share:.1%} of the feed-forward weights"
        print(f"not quantizable: it takes at least {LEAST_SHARE:.0%} under 16 bits, and {share} were in the best map")
    return 0 if end.quantizable else 1
