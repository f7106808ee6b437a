"""The one face that every model file has: a config, names, shapes, tensors and the text side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kimicore.text.source import TextSource

if TYPE_CHECKING:
    import torch

    from kimicore.kernels.packed_linear.layout import PackedWeight

__all__ = ["Progress", "WeightSource"]

Progress = Callable[[str, int, int], None]
"""Called while a model is downloaded: what is fetched, bytes done, bytes in all (0: not known)."""


class WeightSource(Protocol):
    """A model that can be read: opened and checked, nothing of its weights in memory yet.

    Reading is safe from several threads.
    """

    @property
    def path(self) -> Path:
        """The file or folder."""
        ...

    @property
    def fingerprint(self) -> str:
        """Hex digest of headers, config, sizes and sampled bytes of every tensor; the same on every machine."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's config with the keys of a ``config.json``, whatever the file's own format."""
        ...

    @property
    def text(self) -> TextSource:
        """What the tokenizer and the chat template are built from."""
        ...

    def names(self) -> Sequence[str]:
        """Names of all tensors, such as "model.layers.0.self_attn.q_proj.weight"."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, output features first."""
        ...

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor as ``dtype``, dequantized; beside the result at most about 32 MB are used.

        Raises :class:`~kimicore.ModelLoadError` for a name that is not there or a dtype that cannot be read.
        """
        ...

    def packed(self, name: str) -> PackedWeight | None:
        """Return a matrix as the file has quantized it, or None where it has it as floats and nothing is read.

        :meth:`read` gives the same numbers, rounded to its dtype. Raises :class:`~kimicore.ModelLoadError` for a name
        that is not there.
        """
        ...
