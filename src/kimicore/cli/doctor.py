"""``kimicore doctor``: what this machine and this installation can do."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec

from kimicore import __version__

__all__ = ["add_parser", "report", "run"]

_EXTRAS = {
    "trio": "the engine on trio",
    "triton": "kernels on GPUs",
    "huggingface_hub": "models by hub id (pip install 'kimicore[hub]')",
    "transformers": "the oracle of the tests",
}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("doctor", help="what this machine and this installation can do")
    parser.add_argument("--dtype", default="auto", help="the dtype whose operations are shown")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    for name, value in report(options.dtype):
        print(f"{name:24} {value}" if name else "")
    return 0


def report(dtype: str = "auto") -> Iterator[tuple[str, str]]:
    """Yield the report's lines as (name, value)."""
    import torch

    from kimicore.assembly import choose_dtype
    from kimicore.kernels.registry import describe, select_ops
    from kimicore.memory import available_bytes, huge_pages

    yield "kimicore", __version__
    yield "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield "torch", f"{torch.__version__}, {torch.get_num_threads()} threads of {os.cpu_count()} processors"
    yield "vector units", torch.backends.cpu.get_cpu_capability()
    yield "memory available", f"{available_bytes() / 2**30:.1f} GiB"
    yield "huge pages", huge_pages()
    yield "cuda", "available" if torch.cuda.is_available() else "no device"
    for package, use in _EXTRAS.items():
        found = find_spec(package) is not None
        yield package, f"{metadata.version(package)}: {use}" if found else f"not installed: {use}"
    chosen = choose_dtype(dtype)
    yield "", ""
    yield "dtype", str(chosen).removeprefix("torch.")
    for op, implementation, why in describe(select_ops("cpu", chosen)):
        yield op, f"{implementation}: {why}" if why else implementation
