"""A model's weights: checked by name and shape against the spec, then read once, joined as they are used."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from attrs import field, fields, frozen
from torch import Tensor

from kimicore.errors import ModelLoadError
from kimicore.kernels.packed_linear.layout import PackedWeight
from kimicore.kernels.packed_linear.reference import packed_rows
from kimicore.model.modules import modules_of
from kimicore.model.packed.joining import first_rows
from kimicore.model.packed.reading import Matrices
from kimicore.model.products import Stack, Table, Weight, arranged, arranged_parts, tensors_of
from kimicore.model.spec import ModelSpec

if TYPE_CHECKING:
    from kimicore.kernels.ops import ArrangeOp
    from kimicore.model.source import Progress, WeightSource
    from kimicore.policies.precision import ResolvedMap

__all__ = ["LayerWeights", "ModelWeights", "load_weights", "matrices_of", "weight_bytes"]

_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "")
_HEADS = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")
# Buffers that old checkpoints carry and that are computed here, and the other half of multimodal Gemma 3.
_IGNORED = re.compile(r"rotary_emb\.\w*inv_freq$|\.masked_bias$|(^|\.)(vision_tower|multi_modal_projector)\.")
_COMPARED_ELEMENTS = 1 << 21


@frozen(eq=False)
class LayerWeights:
    """One layer's weights: ``qkv`` [(H + 2 KH) D, C], ``output`` [C, H D], ``gate_up`` [2 F, C], ``down`` [C, F].

    ``mlp_norm`` stands before the feed-forward part; the ``*_out_norm`` of a sandwich behind each part.
    """

    input_norm: Tensor
    qkv: Weight
    output: Table
    mlp_norm: Tensor
    gate_up: Weight
    down: Table
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
    """All weights: ``embedding`` and ``head`` [vocab_size, C] (one table where tied), norms, layers.

    ``dtype``: of what is plain, and of what the model computes.
    """

    embedding: Table
    head: Table
    final_norm: Tensor
    layers: tuple[LayerWeights, ...] = field(repr=False)
    dtype: torch.dtype


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
    """Reads tensors in the forms that they are to have and reports how far it is."""

    def __init__(
        self,
        spec: ModelSpec,
        matrices: Matrices,
        progress: Progress | None,
        total: int,
        arrange: ArrangeOp | None = None,
    ) -> None:
        self._spec, self._matrices, self._progress, self._arrange = spec, matrices, progress, arrange
        self._source, self._dtype = matrices.source, matrices.dtype
        self._done, self._total = 0, total

    def _count(self, *names: str) -> None:
        self._done += sum([torch.Size(self._source.shape(name)).numel() for name in names]) * self._dtype.itemsize
        if self._progress is not None:
            self._progress("weights", min(self._done, self._total), self._total)

    def one(self, name: str) -> Tensor:
        """Return a tensor in the model's dtype."""
        tensor = self._source.read(name, self._dtype)
        self._count(name)
        return tensor

    def table(self, name: str) -> Tensor | PackedWeight:
        """Return a matrix in its form."""
        found = self._matrices.one(name)
        self._count(name)
        return found

    def matrix(self, name: str) -> Table:
        """Return a matrix as this machine's products read it."""
        return arranged(self._arrange, self.table(name))

    def norm(self, name: str) -> Tensor:
        """Return a norm's weight; where the norm scales by 1 + w, that in float32."""
        if not self._spec.unit_norm:
            return self.one(name)
        tensor = self._source.read(name, torch.float32) + 1.0
        self._count(name)
        return tensor

    def bias(self, names: Sequence[str]) -> Tensor:
        """Return vectors joined."""
        return torch.cat([self.one(name) for name in names])

    def stacked(self, names: Sequence[str]) -> Weight:
        """Return matrices joined along their rows, as this machine's products read them."""
        found = arranged_parts(self._arrange, self._matrices.stacked(names))
        self._count(*names)
        return found

    def layer(self, prefix: str) -> LayerWeights:
        """Return a layer's weights."""
        spec = self._spec

        def named(part: str, names: str, kind: str) -> list[str]:
            return [f"{prefix}{part}.{name}_proj.{kind}" for name in names.split()]

        sandwich = spec.sandwich_norm
        return LayerWeights(
            input_norm=self.norm(f"{prefix}input_layernorm.weight"),
            qkv=self.stacked(named("self_attn", "q k v", "weight")),
            qkv_bias=self.bias(named("self_attn", "q k v", "bias")) if spec.qkv_bias else None,
            q_norm=self.norm(f"{prefix}self_attn.q_norm.weight") if spec.qk_norm else None,
            k_norm=self.norm(f"{prefix}self_attn.k_norm.weight") if spec.qk_norm else None,
            output=self.matrix(f"{prefix}self_attn.o_proj.weight"),
            output_bias=self.one(f"{prefix}self_attn.o_proj.bias") if spec.output_bias else None,
            attention_out_norm=self.norm(f"{prefix}post_attention_layernorm.weight") if sandwich else None,
            mlp_norm=self.norm(
                f"{prefix}pre_feedforward_layernorm.weight" if sandwich else f"{prefix}post_attention_layernorm.weight"
            ),
            gate_up=self.stacked(named("mlp", "gate up", "weight")),
            gate_up_bias=self.bias(named("mlp", "gate up", "bias")) if spec.mlp_bias else None,
            down=self.matrix(f"{prefix}mlp.down_proj.weight"),
            down_bias=self.one(f"{prefix}mlp.down_proj.bias") if spec.mlp_bias else None,
            mlp_out_norm=self.norm(f"{prefix}post_feedforward_layernorm.weight") if sandwich else None,
        )


def _same(a: Tensor | PackedWeight, b: Tensor | PackedWeight) -> bool:
    """Return whether two tables are equal, comparing a few rows at a time."""
    step = max(1, _COMPARED_ELEMENTS // a.shape[1])

    def rows(table: Tensor | PackedWeight, start: int) -> Tensor:
        stop = min(start + step, table.shape[0])
        if isinstance(table, Tensor):
            return table[start:stop].float()
        return packed_rows(table, torch.arange(start, stop), torch.float32)

    return all(torch.equal(rows(a, start), rows(b, start)) for start in range(0, a.shape[0], step))


def _first(table: Tensor | PackedWeight, count: int) -> Tensor | PackedWeight:
    return table[:count] if isinstance(table, Tensor) else first_rows(table, count)


def load_weights(
    spec: ModelSpec,
    source: WeightSource,
    dtype: torch.dtype,
    progress: Progress | None = None,
    *,
    packed: bool = False,
    precision: ResolvedMap | None = None,
    arrange: ArrangeOp | None = None,
) -> ModelWeights:
    """Read a model's weights, plain ones in ``dtype``.

    ``packed``: matrices that the file has quantized stay so; otherwise they are expanded. ``precision``: round
    matrices to nearest where this map names integers for them, and expand them where it names floats, which mean
    ``dtype``; one that the file has quantized in another form than the map's integers is expanded and rounded again.
    ``arrange``: puts each packed weight into the form in which products read it; None: they stay as they are.

    Peak memory is the weights and one tensor more, in float32 where it is rounded. A tied model whose file has an
    output matrix of its own uses that matrix where it differs from the embeddings (as transformers 5 does), else the
    embeddings; a map treats it as those. Rows of the vocabulary tables behind ``vocab_size`` are padding and left out.
    ``progress`` counts what the tensors take in ``dtype``.

    Raises :class:`~kimicore.ModelLoadError`, naming the tensors, where any is missing, unexpected or of another
    shape than the configuration says; nothing is read then.
    """
    names = set(source.names())
    prefix = next((p for p in _PREFIXES if f"{p}embed_tokens.weight" in names), _PREFIXES[0])
    head_name = next((name for name in _HEADS if name in names), None)
    _check(spec, source, prefix, names, head_name)
    chosen = None if precision is None else _choice(spec, prefix, precision)
    matrices, total = Matrices(source, dtype, packed, chosen), _total_bytes(source, names, dtype)
    reader = _Reader(spec, matrices, progress, total, arrange)
    embedding = _first(reader.table(f"{prefix}embed_tokens.weight"), spec.vocab_size)
    head = embedding
    if head_name is not None:
        own = _first(reader.table(head_name), spec.vocab_size)
        head = embedding if spec.tied and _same(own, embedding) else own
        del own
    table = arranged(arrange, embedding)
    return ModelWeights(
        embedding=table,
        head=table if head is embedding else arranged(arrange, head),
        final_norm=reader.norm(f"{prefix}norm.weight"),
        layers=tuple(reader.layer(f"{prefix}layers.{i}.") for i in range(len(spec.layers))),
        dtype=dtype,
    )


def _choice(spec: ModelSpec, prefix: str, precision: ResolvedMap) -> Callable[[str], str]:
    """Return the map's precision by the names of the file's tensors."""
    by_module = {one.module.name: one.precision for one in precision.modules}
    found = {f"{prefix}{name}.weight": one for name, one in by_module.items()}
    head = by_module["embed_tokens" if spec.tied else "lm_head"]
    return (found | dict.fromkeys(_HEADS, head)).__getitem__


def _total_bytes(source: WeightSource, names: Iterable[str], dtype: torch.dtype) -> int:
    count = 0
    for name in names:
        if not _IGNORED.search(name):
            count += torch.Size(source.shape(name)).numel()
    return count * dtype.itemsize


def matrices_of(weights: ModelWeights) -> Iterator[Table]:
    """Yield every matrix of a model, or part of a stack of them; a table that serves twice comes once."""
    tables: list[Weight] = [weights.embedding]
    tables += [] if weights.head is weights.embedding else [weights.head]
    for layer in weights.layers:
        tables += [layer.qkv, layer.output, layer.gate_up, layer.down]
    for table in tables:
        yield from table.parts if isinstance(table, Stack) else (table,)


def weight_bytes(weights: ModelWeights) -> int:
    """Return the memory that the weights take, shared ones once."""
    parts = [weights.embedding, weights.head, weights.final_norm]
    parts += [getattr(layer, attribute.name) for layer in weights.layers for attribute in fields(LayerWeights)]
    found = {tensor.data_ptr(): tensor for part in parts for tensor in tensors_of(part)}
    return sum([tensor.numel() * tensor.element_size() for tensor in found.values()])
