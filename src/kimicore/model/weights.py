"""A model's weights: checked by name and shape against the spec, then read once, fused as they are used."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from attrs import field, fields, frozen
from torch import Tensor

from kimicore.errors import ModelLoadError
from kimicore.model.modules import modules_of
from kimicore.model.spec import ModelSpec

if TYPE_CHECKING:
    from kimicore.model.source import Progress, WeightSource

__all__ = ["LayerWeights", "ModelWeights", "load_weights", "weight_bytes"]

_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "")
_HEADS = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")
# Buffers that old checkpoints carry and that are computed here, and the other half of multimodal Gemma 3.
_IGNORED = re.compile(r"rotary_emb\.\w*inv_freq$|\.masked_bias$|(^|\.)(vision_tower|multi_modal_projector)\.")
_COMPARED_ROWS = 8192


@frozen(eq=False)
class LayerWeights:
    """One layer's weights: ``qkv`` [(H + 2 KH) D, C], ``output`` [C, H D], ``gate_up`` [2 F, C], ``down`` [C, F].

    ``mlp_norm`` stands before the feed-forward part; the ``*_out_norm`` of a sandwich behind each part.
    """

    input_norm: Tensor
    qkv: Tensor
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    qkv_bias: Tensor | None = None
    output_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    attention_out_norm: Tensor | None = None
    mlp_out_norm: Tensor | None = None


@frozen(eq=False)
class ModelWeights:
    """All weights: ``embedding`` and ``head`` [vocab_size, C] (one tensor where tied), norms, layers."""

    embedding: Tensor
    head: Tensor
    final_norm: Tensor
    layers: tuple[LayerWeights, ...] = field(repr=False)


def _shapes(spec: ModelSpec, prefix: str) -> dict[str, tuple[int, ...]]:
    """Return the tensors of the model by name, but for the tables of the vocabulary, which may have more rows."""
    return {
        prefix + (one.name if one.name.endswith(".bias") else f"{one.name}.weight"): one.shape
        for one in modules_of(spec)
        if one.kind not in ("embedding", "head")
    }


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:6]) + (f" and {len(ordered) - 6} more" if len(ordered) > 6 else "")


def _check(spec: ModelSpec, source: WeightSource, prefix: str, names: set[str], head: str | None) -> None:
    """Refuse missing, unexpected and wrongly shaped tensors before any of them is read."""
    shapes = _shapes(spec, prefix)
    tables = {f"{prefix}embed_tokens.weight"} | ({head} if head else set())
    missing = (shapes.keys() | tables) - names
    if not spec.tied and head is None:
        missing |= {f"{_HEADS[0]} (tie_word_embeddings is false)"}
    unexpected = {name for name in names - shapes.keys() - tables if not _IGNORED.search(name)}
    faults = [f"missing tensors: {_listed(missing)}"] if missing else []
    if unexpected:
        faults.append(f"tensors that a {spec.architecture} model of this configuration has not: {_listed(unexpected)}")
    wrong = []
    for name, shape in shapes.items():
        if name in names and tuple(source.shape(name)) != shape:
            wrong.append(f"{name} is {list(source.shape(name))}, expected {list(shape)}")
    for name in tables & names:
        found = tuple(source.shape(name))
        if len(found) != 2 or found[0] < spec.vocab_size or found[1] != spec.hidden_size:
            wrong.append(f"{name} is {list(found)}, expected at least {[spec.vocab_size, spec.hidden_size]}")
    faults += [f"wrong shapes: {'; '.join(sorted(wrong)[:6])}"] if wrong else []
    if faults:
        raise ModelLoadError(f"{source.path}: " + "; ".join(faults))


class _Reader:
    """Reads tensors in the model's dtype and reports how far it is."""

    def __init__(self, spec: ModelSpec, source: WeightSource, dtype: torch.dtype, progress: Progress | None):
        self._spec, self._source, self._dtype, self._progress = spec, source, dtype, progress
        self._done = 0
        self.total = 0

    def _count(self, tensor: Tensor) -> None:
        self._done += tensor.numel() * self._dtype.itemsize
        if self._progress is not None:
            self._progress("weights", min(self._done, self.total), self.total)

    def one(self, name: str) -> Tensor:
        tensor = self._source.read(name, self._dtype)
        self._count(tensor)
        return tensor

    def norm(self, name: str) -> Tensor:
        """Return a norm's weight; where the norm scales by 1 + w, that in float32."""
        if not self._spec.unit_norm:
            return self.one(name)
        tensor = self._source.read(name, torch.float32) + 1.0
        self._count(tensor)
        return tensor

    def stacked(self, names: Sequence[str]) -> Tensor:
        """Return tensors joined along their rows; only one part exists beside the result at a time."""
        shapes = [tuple(self._source.shape(name)) for name in names]
        result = torch.empty((sum(s[0] for s in shapes), *shapes[0][1:]), dtype=self._dtype)
        row = 0
        for name, shape in zip(names, shapes, strict=True):
            result[row : row + shape[0]].copy_(self._source.read(name, self._dtype))
            row += shape[0]
        self._count(result)
        return result

    def layer(self, prefix: str) -> LayerWeights:
        spec = self._spec

        def stacked(part: str, names: str, kind: str) -> Tensor:
            return self.stacked([f"{prefix}{part}.{name}_proj.{kind}" for name in names.split()])

        sandwich = spec.sandwich_norm
        return LayerWeights(
            input_norm=self.norm(f"{prefix}input_layernorm.weight"),
            qkv=stacked("self_attn", "q k v", "weight"),
            qkv_bias=stacked("self_attn", "q k v", "bias") if spec.qkv_bias else None,
            q_norm=self.norm(f"{prefix}self_attn.q_norm.weight") if spec.qk_norm else None,
            k_norm=self.norm(f"{prefix}self_attn.k_norm.weight") if spec.qk_norm else None,
            output=self.one(f"{prefix}self_attn.o_proj.weight"),
            output_bias=self.one(f"{prefix}self_attn.o_proj.bias") if spec.output_bias else None,
            attention_out_norm=self.norm(f"{prefix}post_attention_layernorm.weight") if sandwich else None,
            mlp_norm=self.norm(
                f"{prefix}pre_feedforward_layernorm.weight" if sandwich else f"{prefix}post_attention_layernorm.weight"
            ),
            gate_up=stacked("mlp", "gate up", "weight"),
            gate_up_bias=stacked("mlp", "gate up", "bias") if spec.mlp_bias else None,
            down=self.one(f"{prefix}mlp.down_proj.weight"),
            down_bias=self.one(f"{prefix}mlp.down_proj.bias") if spec.mlp_bias else None,
            mlp_out_norm=self.norm(f"{prefix}post_feedforward_layernorm.weight") if sandwich else None,
        )


def _same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tables are equal, comparing a few rows at a time."""
    steps = range(0, len(a), _COMPARED_ROWS)
    return all(torch.equal(a[i : i + _COMPARED_ROWS], b[i : i + _COMPARED_ROWS]) for i in steps)


def load_weights(
    spec: ModelSpec, source: WeightSource, dtype: torch.dtype, progress: Progress | None = None
) -> ModelWeights:
    """Read a model's weights in ``dtype``.

    Peak memory is the weights and one tensor more. A tied model whose file has an output matrix of its own uses
    that matrix where it differs from the embeddings (as transformers 5 does), else the embeddings. Rows of the
    vocabulary tables behind ``vocab_size`` are padding and left out.

    Raises :class:`~kimicore.ModelLoadError`, naming the tensors, where any is missing, unexpected or of another
    shape than the configuration says; nothing is read then.
    """
    names = set(source.names())
    prefix = next((p for p in _PREFIXES if f"{p}embed_tokens.weight" in names), _PREFIXES[0])
    head_name = next((name for name in _HEADS if name in names), None)
    _check(spec, source, prefix, names, head_name)
    reader = _Reader(spec, source, dtype, progress)
    reader.total = _total_bytes(source, names, dtype)
    embedding = reader.one(f"{prefix}embed_tokens.weight")[: spec.vocab_size]
    head = embedding
    if head_name is not None:
        own = reader.one(head_name)[: spec.vocab_size]
        head = embedding if spec.tied and _same(own, embedding) else own
        del own
    return ModelWeights(
        embedding=embedding,
        head=head,
        final_norm=reader.norm(f"{prefix}norm.weight"),
        layers=tuple(reader.layer(f"{prefix}layers.{i}.") for i in range(len(spec.layers))),
    )


def _total_bytes(source: WeightSource, names: Iterable[str], dtype: torch.dtype) -> int:
    count = 0
    for name in names:
        if not _IGNORED.search(name):
            count += torch.Size(source.shape(name)).numel()
    return count * dtype.itemsize


def weight_bytes(weights: ModelWeights) -> int:
    """Return the memory that the weights take, shared ones once."""
    found: dict[int, Tensor] = {}
    tables = [getattr(weights, attribute.name) for attribute in fields(ModelWeights)]
    parts = [getattr(layer, attribute.name) for layer in weights.layers for attribute in fields(LayerWeights)]
    for value in tables + parts:
        if isinstance(value, Tensor):
            found[value.data_ptr()] = value
    return sum(tensor.numel() * tensor.element_size() for tensor in found.values())
