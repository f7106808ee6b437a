"""From what a caller names to a model that can be read."""

from __future__ import annotations

import os
from pathlib import Path

from kimicore.errors import ModelLoadError
from kimicore.model.fetch import DEMO_MODELS, default_progress, fetch
from kimicore.model.gguf_source import GGUFSource
from kimicore.model.hub import fetch_hub, is_hub_id
from kimicore.model.mapped import map_file, not_a_model
from kimicore.model.safetensors_source import SafetensorsSource
from kimicore.model.source import Progress, WeightSource

__all__ = ["open_source"]

_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def open_source(model: str | os.PathLike[str], *, progress: Progress | None = None) -> WeightSource:
    """Open a model and check everything but its weights.

    ``model``: a folder with config.json and safetensors files, a GGUF file, the alias of a demo model
    ("smollm2-135m-instruct", "gemma-3-270m"), or a hub id ("organisation/model"; needs
    ``pip install 'kimicore[hub]'``). A path that exists goes before an alias or an id. ``progress``: called
    while a demo model is fetched; by default there is a line on standard error where that is a terminal.

    Raises :class:`~kimicore.ModelLoadError` that names the file and the field. Nothing from a model's files
    is executed.
    """
    name = os.fspath(model)
    if not isinstance(name, str) or not name.strip() or "\0" in name:
        raise ModelLoadError(f"model={name!r}: must be a path, {_aliases()} or a hub id")
    try:
        path = Path(name).expanduser()
        if path.exists():
            return _open_path(path)
    except (OSError, RuntimeError) as error:
        raise ModelLoadError(f"{name}: cannot be read: {error}") from error
    if name in DEMO_MODELS:
        return GGUFSource(fetch(name, progress=progress or default_progress()))
    if isinstance(model, str) and is_hub_id(name) and not name.endswith(_PICKLES):
        return _open_path(fetch_hub(name))
    raise ModelLoadError(
        f"{name}: no such file or folder, and no demo model; demo models are {_aliases()}; "
        "hub ids have the form 'organisation/model'"
    )


def _aliases() -> str:
    return ", ".join(repr(alias) for alias in DEMO_MODELS)


def _open_path(path: Path) -> WeightSource:
    if not path.is_dir():
        return _open_file(path)
    single = path / "model.safetensors"
    ggufs = sorted(entry for entry in path.iterdir() if entry.suffix == ".gguf")
    if ggufs and not single.exists() and not (path / "model.safetensors.index.json").exists():
        if len(ggufs) > 1:
            names = ", ".join(entry.name for entry in ggufs[:6])
            raise ModelLoadError(f"{path}: holds {len(ggufs)} GGUF files; give the path of one of them: {names}")
        return GGUFSource(ggufs[0])
    return SafetensorsSource(path)


def _open_file(path: Path) -> WeightSource:
    if path.suffix == ".safetensors":
        return SafetensorsSource(path.parent, path)
    if path.suffix in _PICKLES:
        raise ModelLoadError(
            f"{path}: is a pickle, which is never opened because loading one can run code: "
            "convert it to safetensors or GGUF"
        )
    if path.suffix == ".gguf":
        return GGUFSource(path)
    file = map_file(path)
    head = bytes(file.buffer[:1024])
    if head.startswith(b"GGUF"):
        return GGUFSource(path)
    raise not_a_model(path, head, file.size_bytes, "a .gguf or .safetensors file, or a folder")
