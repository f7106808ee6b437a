"""``kimicore bench``: how long the steps of a model take here, for the simulator."""

from __future__ import annotations

import argparse
import os
import platform

from attrs import asdict

from kimicore.cli.options import (
    DEMO,
    Progress,
    add_activations_option,
    add_weight_options,
    check_writable,
    weight_settings,
)
from kimicore.config import EngineConfig
from kimicore.errors import ConfigError
from kimicore.sim.measure import fit_engine
from kimicore.sync import SyncEngine

__all__ = ["add_parser", "run"]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("bench", help="measure how long a model's steps take here, for simulate --times")
    parser.add_argument("model", nargs="?", default=DEMO, help=f"alias, folder, GGUF file or hub id (default {DEMO})")
    parser.add_argument("--fit", metavar="FILE", help="write the fitted step times as JSON, for simulate --times FILE")
    parser.add_argument("--repeat", type=int, default=2, metavar="N", help="measure everything N times (2)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    add_weight_options(parser)
    add_activations_option(parser)
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    parser.add_argument("--max-batch-size", type=int, default=64, metavar="N", help="rows of a step at most")
    parser.add_argument("--max-batch-tokens", type=int, default=512, metavar="N", help="tokens of a step at most")
    parser.add_argument("--kv-device-bytes", metavar="SIZE", help="size of the KV arena, such as 512MiB")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress on standard error")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    if options.repeat < 1:
        raise ConfigError(f"--repeat={options.repeat}: must be at least 1")
    if options.fit is not None:
        check_writable(options.fit)
    config = EngineConfig(
        dtype=options.dtype,
        **weight_settings(options),
        activations=options.activations,
        threads=options.threads,
        max_batch_size=options.max_batch_size,
        max_batch_tokens=options.max_batch_tokens,
        kv_device_bytes=options.kv_device_bytes,
        prefix_cache=False,  # every prompt is to be computed
    )
    progress = Progress(options.quiet)
    with SyncEngine(options.model, config, progress=progress) as engine:
        found = fit_engine(engine, repeat=options.repeat, progress=progress)
        progress.clear()
    print(f"{found.measurements} steps, off by {100 * found.mean_error:.1f} % on average", end="")
    print(f" and {100 * found.largest_error:.1f} % at most")
    for name, value in asdict(found.times).items():
        print(f"{name:16}{value:.4g}")
    if options.fit is not None:
        found.times.write(
            options.fit,
            model=str(options.model),
            fit={"steps": found.measurements, "mean_error": found.mean_error, "largest_error": found.largest_error},
            machine={"processor": platform.processor() or platform.machine(), "processors": os.cpu_count()},
            engine={
                "dtype": options.dtype,
                "precision": config.precision,
                "activations": config.activations,
                "skip_layers": list(config.skip_layers),
                "threads": options.threads,
                "max_batch_tokens": options.max_batch_tokens,
            },
        )
    return 0
