"""Models from the Hugging Face hub, by its own library, which is an extra."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from kimicore.errors import ModelLoadError

__all__ = ["fetch_hub", "is_hub_id"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(/[\w./-]{1,200}\.gguf)?", re.ASCII)
# Only what is read. Code, pickles and other formats are not even downloaded.
_WANTED = ("*.json", "*.safetensors", "*.jinja")
_UNWANTED = ("*/*", "consolidated*.safetensors", "adapter_*")


def is_hub_id(name: str) -> bool:
    """Return whether a name has the form "organisation/model" or "organisation/model/file.gguf"."""
    return _HUB_ID.fullmatch(name) is not None and ".." not in name


def fetch_hub(name: str) -> Path:
    """Return the folder of a hub model, or the file where the name goes on to a GGUF file.

    The library caches, resumes and shows progress in its own way. Raises
    :class:`~kimicore.ModelLoadError` where the library is missing or the hub cannot serve the model.
    """
    try:
        import huggingface_hub as hub
    except ImportError as error:
        raise ModelLoadError(
            f"{name}: is neither a path nor a demo model; to download it from the hub: pip install 'kimicore[hub]'"
        ) from error
    organisation, model, *rest = name.split("/", 2)
    repository = f"{organisation}/{model}"
    try:
        return Path(_download(hub, repository, rest[0] if rest else None))
    except Exception as error:  # the library raises errors of its own, of its transport and of the system
        raise ModelLoadError(f"{name}: cannot be downloaded from the hub: {type(error).__name__}: {error}") from error


def _download(hub: Any, repository: str, file: str | None) -> str:
    if file is not None:
        return str(hub.hf_hub_download(repository, file))
    return str(hub.snapshot_download(repository, allow_patterns=list(_WANTED), ignore_patterns=list(_UNWANTED)))
