"""Tiny random models with their oracle, and a bench that runs batches without an engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from attrs import define, field
from safetensors.torch import load_file
from torch import Tensor

from kimicore.kernels.registry import select_ops
from kimicore.kv.arena import Arena, slab_bytes
from kimicore.model.batch import Batch
from kimicore.model.kv_layout import kv_classes
from kimicore.model.spec import spec_from_config
from kimicore.model.transformer import Transformer
from kimicore.text.source import TextSource


class MemorySource:
    """Weights that are in memory already, behind the face of a file."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], path: str = "memory") -> None:
        self.path, self.fingerprint, self.config = Path(path), "memory", config
        self.text = TextSource(None, None, None, None, (), None, False)
        self.tensors = dict(tensors)
        self.reads: list[str] = []

    def names(self) -> Sequence[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        self.reads.append(name)
        return self.tensors[name].to(dtype, copy=True)


@define(eq=False)
class Row:
    """A sequence on the bench: its tokens, what of it is computed, and its blocks per KV class."""

    tokens: list[int]
    rope_tokens: int
    computed: int = 0
    tables: list[list[int]] = field(factory=list)


class Bench:
    """Runs a model over an arena that was filled with NaN, with a block table per row, as an engine would."""

    def __init__(
        self, model: Transformer, *, blocks: int = 200, block_tokens: int = 16, dtype: str = "float32"
    ) -> None:
        self.model, self.block_tokens = model, block_tokens
        self.classes = kv_classes(model.spec, dtype, block_tokens)
        self.arena = Arena(self.classes, blocks * slab_bytes(self.classes))
        for view in self.arena.views:
            view.fill_(torch.nan)
        self._free = list(range(1, self.arena.slabs))

    def row(self, tokens: Sequence[int], rope_tokens: int | None = None) -> Row:
        length = len(tokens) if rope_tokens is None else rope_tokens
        return Row(list(tokens), length, tables=[[] for _ in self.classes])

    def _grow(self, row: Row, end: int) -> None:
        for index, table in enumerate(row.tables):
            while len(table) * self.block_tokens < end:  # one block a slab: slot numbers are far apart
                table.append(self._free.pop(0) * self.arena.blocks_per_slab[index])

    def _table(self, row: Row, index: int, start: int) -> list[int]:
        """Return the row's table with 0 for every block that its earliest query has left behind."""
        window = self.classes[index].window
        table = list(row.tables[index])
        if window is not None:
            for i in range(max(0, start - window + 1) // self.block_tokens):
                table[i] = 0
        return table

    def run(self, work: Sequence[tuple[Row, int]], *, selected: str | int = "all", dummies: int = 0) -> list[Tensor]:
        """Compute ``count`` more tokens of each row in one batch; return each row's logits [n, V].

        ``selected``: "all", "last", "none" or how many of the last; ``dummies`` padding tokens go behind the rows.
        """
        starts, ids, positions, ropes, wanted, contexts = [0], [], [], [], [], []
        slots: list[list[int]] = [[] for _ in self.classes]
        tables: list[list[list[int]]] = [[] for _ in self.classes]
        for row, count in work:
            start, end = row.computed, row.computed + count
            self._grow(row, end)
            first = starts[-1]
            kept = selected if isinstance(selected, int) else {"all": count, "last": 1, "none": 0}[selected]
            wanted.append(range(first + max(0, count - kept), first + count))
            ids += row.tokens[start:end]
            positions += range(start, end)
            ropes += [row.rope_tokens] * count
            contexts.append(end)
            starts.append(first + count)
            for c in range(len(self.classes)):
                bt = self.block_tokens
                slots[c] += [row.tables[c][p // bt] * bt + p % bt for p in range(start, end)]
                tables[c].append(self._table(row, c, start))
            row.computed = end
        for c in range(len(self.classes)):
            slots[c] += [i % self.block_tokens for i in range(dummies)]
        batch = self._batch(
            ids + [0] * dummies,
            positions + [0] * dummies,
            starts,
            contexts,
            tables,
            slots,
            ropes + [0] * dummies,
            [i for part in wanted for i in part],
        )
        with torch.inference_mode():
            logits = self.model.logits(self.model.forward(batch, self.arena.views))
        return list(logits.split([len(part) for part in wanted]))

    def _batch(self, ids, positions, starts, contexts, tables, slots, ropes, wanted) -> Batch:  # type: ignore[no-untyped-def]
        width = max(len(table) for part in tables for table in part)
        padded = [[table + [0] * (width - len(table)) for table in part] for part in tables]
        return Batch(
            token_ids=torch.tensor(ids),
            positions=torch.tensor(positions),
            row_starts=torch.tensor(starts, dtype=torch.int32),
            contexts=torch.tensor(contexts, dtype=torch.int32),
            block_tables=tuple(torch.tensor(part, dtype=torch.int32) for part in padded),
            slots=tuple(torch.tensor(part) for part in slots),
            rope_tokens=torch.tensor(ropes),
            selected=torch.tensor(wanted, dtype=torch.int64),
        )

    def whole(self, tokens: Sequence[int], *, chunk: int | None = None, rope_tokens: int | None = None) -> Tensor:
        """Return the logits of a prompt [T, V], computed at once or in chunks."""
        row = self.row(tokens, rope_tokens)
        step = chunk or len(tokens)
        parts = []
        while row.computed < len(tokens):
            parts += self.run([(row, min(step, len(tokens) - row.computed))])
        return torch.cat(parts)


@define(eq=False)
class Tiny:
    """A tiny random model in a folder, its two oracles, and how far these are apart."""

    folder: Path
    config: dict[str, Any]
    oracles: dict[str, Any]

    def source(self) -> MemorySource:
        return MemorySource(self.config, load_file(self.folder / "model.safetensors"))

    def model(self, **kwargs: Any) -> Transformer:
        ops = select_ops("cpu", torch.float32, native=False)
        return Transformer.load(spec_from_config(self.config), self.source(), ops, torch.float32, **kwargs)

    def bench(self, **kwargs: Any) -> Bench:
        return Bench(self.model(), **kwargs)

    def expected(self, tokens: Sequence[int]) -> tuple[Tensor, float]:
        """Return the oracle's logits [T, V] and the tolerance: 5e-4, or thrice the oracle's own gap."""
        ids = torch.tensor([list(tokens)])
        with torch.inference_mode():
            first, *others = (model(input_ids=ids, use_cache=False).logits[0] for model in self.oracles.values())
        return first, max([5e-4, *(3 * float((first - other).abs().max()) for other in others)])


SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "gemma3_text": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
}


def _randomize(model: Any) -> None:
    """Give norms and biases, which start as ones and zeros, values that a mistake would show in."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
        assert parameter.isfinite().all(), name


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., Tiny]:
    """Make a tiny random model: ``tiny("llama", rope_parameters={...})``."""

    def make(model_type: str, attention: Sequence[str] = ("eager", "sdpa"), **changes: Any) -> Tiny:
        config_class, model_class = _CLASSES[model_type]
        values = {**SIZES, **changes}
        torch.manual_seed(3)
        model = model_class(config_class(**values, attn_implementation=attention[0])).eval()
        _randomize(model)
        folder = tmp_path / f"{model_type}-{len(list(tmp_path.iterdir()))}"
        model.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        oracles = {attention[0]: model}
        for name in attention[1:]:
            other = model_class(config_class(**values, attn_implementation=name)).eval()
            other.load_state_dict(model.state_dict())
            oracles[name] = other
        return Tiny(folder, config, oracles)

    return make


@pytest.fixture
def prompt() -> Callable[[int], list[int]]:
    """Return random token ids of a given number, the same every time."""

    def make(count: int, seed: int = 0) -> list[int]:
        return torch.randint(0, SIZES["vocab_size"], (count,), generator=torch.Generator().manual_seed(seed)).tolist()

    return make


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny products are slower on two
    yield
    torch.set_num_threads(before)


def close(actual: Tensor, expected: tuple[Tensor, float], where: str = "") -> None:
    """Assert that logits are finite and within the tolerance."""
    wanted, tolerance = expected
    assert actual.shape == wanted.shape
    assert actual.isfinite().all(), f"{where}: not finite"
    gap = float((actual - wanted).abs().max())
    assert gap <= tolerance, f"{where}: off by {gap:.2e}, tolerance {tolerance:.2e}"


@pytest.fixture(name="close")
def _close() -> Callable[..., None]:
    return close


@pytest.fixture
def memory_source() -> type[MemorySource]:
    return MemorySource


@pytest.fixture
def bench_of() -> type[Bench]:
    return Bench
