"""A model's weights a layer at a time, in float32, by the names of its modules."""

from __future__ import annotations

from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from kimicore.errors import ModelLoadError
from kimicore.model.modules import modules_of
from kimicore.model.source import WeightSource
from kimicore.model.spec import ModelSpec, spec_from_config

__all__ = ["ModelReader", "tensor_name"]

_PREFIXES: Final = ("model.", "model.language_model.", "language_model.model.", "")
_HEADS: Final = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")
_TABLES: Final = ("embed_tokens", "lm_head")


def tensor_name(module: str) -> str:
    """Return the name of a module's tensor as it stands behind what comes before the layers."""
    return module if module.endswith(".bias") else f"{module}.weight"


@frozen(eq=False)
class ModelReader:
    """Reads what a model's files hold; made by :meth:`of`."""

    spec: ModelSpec
    source: WeightSource
    prefix: str
    head: str | None

    @classmethod
    def of(cls, source: WeightSource) -> ModelReader:
        """Return the reader of a source.

        Raises :class:`~kimicore.ModelLoadError` where a tensor of the model is missing or has another shape than its
        configuration says, before any is read.
        """
        spec = spec_from_config(source.config)
        names = set(source.names())
        prefix = next((one for one in _PREFIXES if f"{one}embed_tokens.weight" in names), _PREFIXES[0])
        found = cls(spec, source, prefix, next((name for name in _HEADS if name in names), None))
        missing, wrong = [], []
        for one in modules_of(spec):
            name = found.file_name(one.name)
            if name is None or name not in names:
                missing.append(name or one.name)
                continue
            shape = tuple(source.shape(name))
            rows = shape[0] >= one.shape[0] if one.name in _TABLES and shape else shape == one.shape
            if not rows or shape[1:] != one.shape[1:]:
                wrong.append(f"{name} is {list(shape)}, expected {list(one.shape)}")
        if missing or wrong:
            faults = [f"missing tensors: {', '.join(missing[:6])}"] * bool(missing) + wrong[:6]
            raise ModelLoadError(f"{source.path}: {'; '.join(faults)}")
        return found

    def file_name(self, module: str) -> str | None:
        """Return what a module's tensor is called in the files; None for a head that they have not."""
        return self.head if module == "lm_head" else self.prefix + tensor_name(module)

    def layer(self, index: int) -> dict[str, Tensor]:
        """Return a layer's tensors in float32 by their names within the layer, such as "mlp.up_proj.weight"."""
        start = f"layers.{index}."
        names = [tensor_name(one.name) for one in modules_of(self.spec) if one.name.startswith(start)]
        return {name[len(start) :]: self.source.read(self.prefix + name, torch.float32) for name in names}

    def embedding(self) -> Tensor:
        """Return the embedding [V, C] in float32, without rows that pad the vocabulary."""
        return self.source.read(f"{self.prefix}embed_tokens.weight", torch.float32)[: self.spec.vocab_size]

    def final_norm(self) -> Tensor:
        """Return the last norm's weight [C] as its file has it."""
        return self.source.read(f"{self.prefix}norm.weight", torch.float32)

    def own_head(self) -> Tensor | None:
        """Return the output matrix [V, C] in float32 where the files have one."""
        if self.head is None:
            return None
        return self.source.read(self.head, torch.float32)[: self.spec.vocab_size]
