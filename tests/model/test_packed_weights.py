"""Weights that stay packed: joined where they have one form, counted as they are, rounded as a map says."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kimicore.errors import ModelLoadError
from kimicore.kernels.packed_linear.layout import PackedWeight, pack_codes
from kimicore.kernels.packed_linear.reference import unpack
from kimicore.kernels.registry import select_ops
from kimicore.model.modules import modules_of
from kimicore.model.packed.joining import expand, first_rows, form_of, joined, same_form
from kimicore.model.packed.reading import is_rounded_to
from kimicore.model.packed.rounding import round_to_nearest
from kimicore.model.products import Stack, lookup, product
from kimicore.model.spec import spec_from_config
from kimicore.model.transformer import Transformer
from kimicore.policies.precision import PRECISIONS, ResolvedMap
from kimicore.policies.precision.named import policy_named, resolved_by

OPS = select_ops("cpu", torch.float32, native=False)
WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}


def weight(seed: int, outs: int, depth: int, form: str = "int4-g32") -> PackedWeight:
    """A random weight rounded to a map's precision."""
    return round_to_nearest(torch.randn((outs, depth), generator=torch.Generator().manual_seed(seed)), form)


def odd(seed: int, outs: int, depth: int) -> PackedWeight:
    """A random weight with all that a weight may have: zeros, offsets, two levels, an order."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 64, (outs, depth), generator=generator, dtype=torch.uint8)
    groups = -(-depth // 16)
    return PackedWeight(
        outs,
        depth,
        6,
        16,
        pack_codes(codes, 6),
        torch.randint(1, 60, (outs, groups), generator=generator, dtype=torch.uint8),
        zeros=torch.randint(0, 64, (outs, groups), generator=generator, dtype=torch.uint8),
        offsets=torch.randint(0, 60, (outs, groups), generator=generator, dtype=torch.uint8),
        super_scales=torch.rand((outs, 1), generator=generator).half() / 1000,
        super_offsets=torch.rand((outs, 1), generator=generator).half() / 1000,
        order=torch.randperm(depth, generator=torch.Generator().manual_seed(0)).to(torch.int32),
    )


class CodedSource:
    """A source in memory, some of whose matrices are quantized."""

    def __init__(self, plain: Any, coded: Mapping[str, PackedWeight]) -> None:
        self._plain, self._coded = plain, dict(coded)
        self.path, self.fingerprint, self.config, self.text = plain.path, "coded", plain.config, plain.text
        self.reads: list[str] = []

    def names(self) -> list[str]:
        return list(self._plain.names())

    def shape(self, name: str) -> tuple[int, ...]:
        return self._plain.shape(name)  # type: ignore[no-any-return]

    def packed(self, name: str) -> PackedWeight | None:
        return self._coded.get(name)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        self.reads.append(name)
        return expand(self._coded[name], dtype) if name in self._coded else self._plain.read(name, dtype)


def coded_source(made: Any, forms: Mapping[str, str]) -> CodedSource:
    """Return a tiny model's source whose matrices are rounded by the last word of their modules' names."""
    plain = made.source()
    coded = {}
    for name in plain.names():
        module = name.removesuffix(".weight").rpartition(".")[2]
        if module in forms:
            coded[name] = round_to_nearest(plain.read(name, torch.float32), forms[module])
    return CodedSource(plain, coded)


def load(source: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Transformer:
    return Transformer.load(spec_from_config(source.config), source, OPS, dtype, **kwargs)


def named(source: Any, name: str, **settings: Any) -> ResolvedMap:
    return resolved_by(policy_named(name, settings), modules_of(spec_from_config(source.config)))


@pytest.mark.parametrize("make", [weight, odd])
@given(
    seed=st.integers(0, 1 << 30), sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4), depth=st.integers(1, 4)
)
def test_joining_and_cutting_change_no_number(make: Any, seed: int, sizes: list[int], depth: int) -> None:
    """Weights of one form joined have all their rows, cut the first of them, and expanded what they mean."""
    parts = [make(seed + index, size, 32 * depth) for index, size in enumerate(sizes)]
    assert all(same_form(parts[0], part) for part in parts)
    whole = joined(parts)
    expected = torch.cat([unpack(part, torch.float32) for part in parts])
    assert whole.shape == (sum(sizes), 32 * depth)
    assert torch.equal(unpack(whole, torch.float32), expected)
    assert whole.weight_bytes == sum(
        sum(t.numel() * t.element_size() for t in part.tensors if t is not part.order) for part in parts
    ) + (0 if whole.order is None else 4 * 32 * depth)
    assert torch.equal(unpack(first_rows(whole, sizes[0]), torch.float32), expected[: sizes[0]])
    back = expected if whole.order is None else expected[:, torch.argsort(whole.order.long())]
    assert torch.equal(expand(whole, torch.bfloat16), back.to(torch.bfloat16))


def test_weights_of_other_forms_are_not_one() -> None:
    """Bits, groups, zeros, orders and types of scales must all be the same for two weights to be joined."""
    base = weight(0, 8, 128)
    assert same_form(base, weight(1, 3, 128))
    for other in ("int4", "int5", "int8"):
        assert not same_form(base, weight(0, 8, 128, other))
    assert not same_form(base, odd(0, 8, 128))
    moved = odd(1, 8, 128)
    moved.order.copy_(moved.order.flip(0))
    assert not same_form(odd(0, 8, 128), moved)
    assert not same_form(odd(0, 8, 128), odd(0, 8, 64))


@given(seed=st.integers(0, 1 << 30), rows=st.integers(1, 5), biased=st.booleans())
def test_products_with_every_form(seed: int, rows: int, biased: bool) -> None:
    """A product with a packed weight or a stack is that with the weights that they mean, bias included."""
    generator = torch.Generator().manual_seed(seed)
    parts = (weight(seed, 24, 64), torch.randn((8, 64), generator=generator), odd(seed, 17, 64))
    stack = Stack(parts)
    dense = torch.cat([part if isinstance(part, Tensor) else expand(part, torch.float32) for part in parts])
    assert stack.shape == (49, 64)
    x = torch.randn((rows, 64), generator=generator)
    bias = torch.randn(49, generator=generator) if biased else None
    expected = torch.nn.functional.linear(x, dense, bias)
    assert torch.allclose(product(OPS, x, stack, bias), expected, rtol=1e-4, atol=1e-4)
    one = parts[0]
    assert torch.allclose(product(OPS, x, one), x @ expand(one, torch.float32).T, rtol=1e-4, atol=1e-4)
    ids = torch.randint(0, 17, (rows,), generator=generator)
    assert torch.equal(lookup(OPS, parts[2], ids, torch.float32), expand(parts[2], torch.float32)[ids])


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"])
def test_packed_models_give_the_same_logits(family: str, tiny: Any, prompt: Any, bench_of: Any, close: Any) -> None:
    """A quantized model of every family gives the logits that its expanded weights give, in as few parts as can be."""
    made = tiny(family, **WIDE)
    forms = dict.fromkeys(("q_proj", "k_proj", "o_proj", "gate_proj", "down_proj"), "int4-g32")
    forms |= {"v_proj": "int8", "up_proj": "int4-g32", "embed_tokens": "int5", "lm_head": "int8"}
    source = coded_source(made, forms)
    packed, plain = load(source, packed=True), load(source)
    assert packed.packed
    assert not plain.packed
    layer = packed.weights.layers[0]
    assert isinstance(layer.qkv, Stack)
    assert [part.shape for part in layer.qkv.parts] == [(96, 64), (32, 64)]
    assert isinstance(layer.gate_up, PackedWeight)
    tokens = prompt(30)
    close(bench_of(packed).whole(tokens), (bench_of(plain).whole(tokens), 5e-4))


def test_bytes_are_those_of_the_codes(tiny: Any) -> None:
    """Packed weights are counted as they lie in memory, a shared table once, and told by their forms."""
    source = coded_source(
        tiny("llama", tie_word_embeddings=True, **WIDE), {"embed_tokens": "int8", "down_proj": "int4"}
    )
    model, plain = load(source, packed=True), load(source)
    assert model.weights.head is model.weights.embedding
    saved = 131 * 64 * 4 - 131 * (64 + 2) + 3 * (64 * 128 * 4 - 64 * (64 + 2))
    assert model.weight_bytes == plain.weight_bytes - saved
    forms = {name: (count, size) for name, count, size in model.forms()}
    assert forms["8 bits in rows"] == (1, 131 * 66)
    assert forms["4 bits in rows"] == (3, 3 * 64 * 66)
    assert forms["float32"][0] == 9
    assert form_of(odd(0, 3, 64)) == "6 bits in groups of 16 with zeros and offsets and order"


def test_packed_vocabularies_are_cut(tiny: Any) -> None:
    """Rows of a packed table that pad the vocabulary are left out."""
    source = coded_source(tiny("llama", **WIDE), {"embed_tokens": "int8", "lm_head": "int8"})
    source.config = {**source.config, "vocab_size": 120}
    model = load(source, packed=True)
    assert model.weights.embedding.shape == (120, 64)
    assert model.logits(torch.ones(2, 64)).shape == (2, 120)


@pytest.mark.parametrize("packed", [True, False])
def test_a_map_rounds_plain_weights(packed: bool, tiny: Any) -> None:
    """Matrices that a map gives integers are what rounding to nearest makes of them, packed or expanded."""
    source = CodedSource(tiny("llama", **WIDE).source(), {})
    chosen = named(source, "asymmetric")
    model = load(source, packed=packed, precision=chosen)
    assert model.precision is chosen
    for index, layer in enumerate(model.weights.layers):
        down = source.read(f"model.layers.{index}.mlp.down_proj.weight", torch.float32)
        expected = round_to_nearest(down, chosen.precision(f"layers.{index}.mlp.down_proj"))
        found = layer.down if isinstance(layer.down, Tensor) else unpack(layer.down, torch.float32)
        assert isinstance(layer.down, PackedWeight) == packed
        assert torch.equal(found, unpack(expected, torch.float32))
        assert torch.equal(layer.output, source.read(f"model.layers.{index}.self_attn.o_proj.weight", torch.float32))
    assert isinstance(model.weights.embedding, Tensor)


def test_a_map_by_module(tiny: Any) -> None:
    """Each module has its own precision, also within a product of several, and a tied output matrix its embedding's."""
    made = tiny("llama", tie_word_embeddings=True, **WIDE)
    source = CodedSource(made.source(), {})
    exact = {"embed_tokens": "int8", "layers.1.self_attn.k_proj": "int4-g32", "layers.1.self_attn.v_proj": "int4-g32"}
    model = load(source, packed=True, precision=named(source, "custom", exact=exact))
    assert isinstance(model.weights.embedding, PackedWeight)
    assert model.weights.head is model.weights.embedding
    qkv = model.weights.layers[1].qkv
    assert isinstance(qkv, Stack)
    assert [isinstance(part, PackedWeight) for part in qkv.parts] == [False, True]
    assert qkv.parts[1].shape == (64, 64)
    assert isinstance(model.weights.layers[0].qkv, Tensor)


def test_a_map_of_the_vocabulary(tiny: Any) -> None:
    """Of a model that is not tied, the embedding and the output matrix have each their own precision."""
    source = CodedSource(tiny("llama", **WIDE).source(), {})
    for exact, kinds in (
        ({"lm_head": "int8"}, (Tensor, PackedWeight)),
        ({"embed_tokens": "int8"}, (PackedWeight, Tensor)),
    ):
        weights = load(source, packed=True, precision=named(source, "custom", exact=exact)).weights
        assert isinstance(weights.embedding, kinds[0])
        assert isinstance(weights.head, kinds[1])


def test_a_map_over_quantized_weights(tiny: Any) -> None:
    """Codes that have the map's form are kept; others are expanded, and rounded again where the map has integers."""
    forms = {"down_proj": "int4", "gate_proj": "int8", "up_proj": "int8", "o_proj": "int5"}
    source = coded_source(tiny("llama", **WIDE), forms)
    model = load(source, packed=True, precision=named(source, "asymmetric"))
    layer = model.weights.layers[0]
    stored = source.packed("model.layers.0.mlp.down_proj.weight")
    assert layer.down is stored
    assert isinstance(layer.output, Tensor)
    assert isinstance(layer.gate_up, PackedWeight)
    again = [
        round_to_nearest(source.read(f"model.layers.0.mlp.{n}_proj.weight", torch.float32), "int4-g64")
        for n in ("gate", "up")
    ]
    assert torch.equal(unpack(layer.gate_up, torch.float32), torch.cat([unpack(one, torch.float32) for one in again]))


@pytest.mark.parametrize("precision", [name for name, form in PRECISIONS.items() if form.kind == "int"])
@pytest.mark.parametrize("depth", [32, 128, 640])
def test_the_form_of_a_rounding_is_known(precision: str, depth: int) -> None:
    """A weight that was rounded to a precision has its form, and nothing with zeros or of other bits has."""
    rounded = weight(1, 8, depth, precision)
    assert is_rounded_to(rounded, precision)
    assert not is_rounded_to(odd(1, 8, depth), precision)
    assert is_rounded_to(rounded, "int8") == (precision == "int8")


def test_infinite_weights_cannot_be_rounded(tiny: Any) -> None:
    """A weight that is infinite is refused by its name where a map would round it."""
    plain = tiny("llama", **WIDE).source()
    name = "model.layers.1.mlp.up_proj.weight"
    plain.tensors[name][3, 5] = torch.inf
    source = CodedSource(plain, {})
    with pytest.raises(ModelLoadError, match=rf"memory: {name}: 1 of its weights"):
        load(source, precision=named(source, "asymmetric"))


def test_packed_parts_are_dropped(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """While packed weights are joined, no layer's parts outlive it: peak memory is the weights and one product's."""
    source = coded_source(tiny("llama", **WIDE), dict.fromkeys(("q_proj", "k_proj", "v_proj"), "int4-g32"))
    alive: list[weakref.ref[PackedWeight]] = []
    coded = source._coded

    def packed(name: str) -> PackedWeight | None:
        if name not in coded:
            return None
        if "q_proj" in name:
            assert all(part() is None for part in alive)
        found = joined([first_rows(coded[name], 1), first_rows(coded[name], coded[name].outs)])
        found = first_rows(found, coded[name].outs)
        alive.append(weakref.ref(found))
        return found

    monkeypatch.setattr(source, "packed", packed)
    model = load(source, packed=True)
    assert len(alive) == 9
    assert all(part() is None for part in alive)
    assert isinstance(model.weights.layers[0].qkv, PackedWeight)


def test_progress_ends_at_its_total(tiny: Any) -> None:
    """Progress counts what the tensors take expanded, packed or not, and ends at the total."""
    source = coded_source(tiny("qwen2", **WIDE), {"down_proj": "int4"})
    seen: list[tuple[str, int, int]] = []
    load(source, packed=True, progress=lambda *args: seen.append(args))
    total = load(source).weight_bytes
    assert seen[-1] == ("weights", total, total)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
