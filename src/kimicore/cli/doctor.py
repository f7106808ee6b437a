"""``kimicore doctor``: what this machine and this installation can do, and what lies in a model."""

from __future__ import annotations

import argparse
import math
import os
import platform
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING

from kimicore import __version__
from kimicore.cli.options import NO_MAPS, add_weight_options, weight_settings
from kimicore.config import EngineConfig
from kimicore.errors import ConfigError

if TYPE_CHECKING:
    from kimicore.kernels.registry import Ops
    from kimicore.model.source import WeightSource

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
    parser.add_argument(
        "model", nargs="?", help="alias, folder, GGUF file or hub id: show what lies in its files and in memory too"
    )
    parser.add_argument("--dtype", default="auto", help="the dtype whose operations are shown")
    add_weight_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    config = EngineConfig(dtype=options.dtype, **weight_settings(options))
    if config.skip_layers and options.model is None:
        raise ConfigError(f"--skip-layers {options.skip_layers}: goes with a model; name the one that has these layers")
    for name, value in report(config, options.model):
        print(f"{name:24} {value}" if name else value, flush=True)
    return 0


def report(config: EngineConfig, model: str | None = None) -> Iterator[tuple[str, str]]:
    """Yield the report's lines as (name, value); with a model, what lies in its files and in memory stands below.

    ``config``: its dtype and precision are those of the report. The model is loaded for the last lines, without the
    layers that ``config`` skips.
    """
    import torch

    from kimicore.assembly import choose_dtype, keeps_packed
    from kimicore.kernels.registry import describe, select_ops
    from kimicore.memory import available_bytes, huge_pages
    from kimicore.model.load import open_source
    from kimicore.model.skipping import without_layers
    from kimicore.verify.stored import describe_model

    source = None if model is None else open_source(model)
    view = None if source is None else without_layers(source, config.skip_layers)
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
    chosen = choose_dtype(config.dtype)
    yield "", ""
    yield "dtype", str(chosen).removeprefix("torch.")
    ops = select_ops("cpu", chosen)
    for op, implementation, why in describe(ops):
        yield op, f"{implementation}: {why}" if why else implementation
    packed, why = keeps_packed(config, ops)
    yield "quantized weights", "stay packed in memory" if packed else f"are expanded at load: {why}"
    if source is not None and view is not None:
        yield "", ""
        yield from describe_model(source)
        yield from _in_memory(source, view, ops, packed, config)


def _in_memory(
    whole: WeightSource, source: WeightSource, ops: Ops, packed: bool, config: EngineConfig
) -> Iterator[tuple[str, str]]:
    """Yield the forms that the matrices of a source have once they are loaded as ``config`` says.

    ``whole``: the model that it is of, with the layers that are skipped.
    """
    from kimicore.assembly import choose_dtype
    from kimicore.memory import available_bytes
    from kimicore.model.modules import modules_of
    from kimicore.model.spec import spec_from_config
    from kimicore.model.transformer import Transformer
    from kimicore.policies.precision.named import policy_named, resolved_by
    from kimicore.verify.stored import stored_formats

    dtype, spec = choose_dtype(config.dtype), spec_from_config(source.config)
    modules = modules_of(spec)
    weights = sum([math.prod(one.shape) for one in modules])
    needed = dtype.itemsize * weights
    if packed:  # each layer has about the same share of the file
        stored = sum([one.size_bytes for one in stored_formats(whole)])
        needed = stored * weights // sum([math.prod(one.shape) for one in modules_of(spec_from_config(whole.config))])
    if needed > (available := available_bytes()):
        yield "in memory", f"not loaded: some {needed:,} bytes are needed, and {available:,} are available"
        return
    maps = None
    if config.precision not in NO_MAPS:
        maps = resolved_by(policy_named(config.precision, config.policy.get("precision")), modules)
    loaded = Transformer.load(spec, source, ops, dtype, packed=packed, precision=maps)
    gone = f" without layers {', '.join(map(str, sorted(config.skip_layers)))}" if config.skip_layers else ""
    yield "in memory", f"{loaded.weight_bytes:,} bytes of weights with precision={config.precision!r}{gone}"
    forms = loaded.forms()
    width = max([22, *(len(name) for name, _, _ in forms)])
    for name, count, size in forms:
        yield "", f"  {name:{width}} {count} matrices, {size:,} bytes"
