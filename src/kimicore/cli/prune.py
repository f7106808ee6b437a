"""``kimicore prune``: leave out the layers that a model misses least."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from kimicore.cli.options import Progress
from kimicore.errors import ConfigError

if TYPE_CHECKING:
    from kimicore.pruning.choosing import Choice

__all__ = ["add_parser", "run"]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("prune", help="leave out the layers that a model misses least")
    parser.add_argument("model", help="alias, folder, GGUF file or hub id")
    parser.add_argument("--layers", type=int, required=True, metavar="N", help="how many layers go")
    parser.add_argument("--out", metavar="DIR", help="folder to write; left out: only tell which layers would go")
    parser.add_argument("--measure", default="influence", help="influence, or kl: the loss without a layer")
    parser.add_argument("--samples", type=int, default=20, metavar="N", help="sequences for influence (default 20)")
    parser.add_argument("--sample-tokens", type=int, default=256, metavar="N", help="tokens of each (default 256)")
    parser.add_argument("--prompts", type=int, default=50, metavar="N", help="prompts for kl and --verify (default 50)")
    parser.add_argument("--verify", action="store_true", help="compare what is left with the model as it was")
    parser.add_argument("--overwrite", action="store_true", help="replace DIR, or what an interrupted run left")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress on standard error")
    parser.set_defaults(run=run, verdict=True)


def run(options: argparse.Namespace) -> int:
    """Run the command and return 0, or 1 where the result was verified and fails."""
    if options.layers < 1:
        raise ConfigError(f"--layers={options.layers}: must be at least 1")
    from kimicore.pruning.run import PruneSettings, choose_layers, prune_model
    from kimicore.verify import verify

    settings = PruneSettings(options.measure, options.samples, options.sample_tokens, options.prompts, options.threads)
    progress = Progress(options.quiet)
    try:
        if options.out is None:
            choice = choose_layers(options.model, options.layers, settings, progress=progress)
            _show(choice, progress)
            compared: dict[str, Any] = {"skip_layers": choice.skip_layers}
        else:
            made = prune_model(
                options.model, options.out, options.layers, settings, overwrite=options.overwrite, progress=progress
            )
            _show(made.choice, progress)
            left = len(made.choice.influence) - len(made.choice.removals)
            print(f"{made.folder}: {made.weight_bytes:,} bytes of weights in {left} layers", flush=True)
            compared = {"candidate": made.folder}
        if not options.verify:
            return 0
        how: dict[str, Any] = {"prompts": options.prompts, "threads": options.threads, "progress": progress}
        report = verify(options.model, **compared, **how)
    finally:
        progress.clear()
    print(f"\n{report.table()}")
    return 0 if report.passed else 1


def _show(choice: Choice, progress: Progress) -> None:
    progress.clear()
    print(choice.table())
    print(f"\nskip_layers = {list(choice.skip_layers)}", flush=True)
