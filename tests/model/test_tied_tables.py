"""An embedding that also serves as the output matrix: both have the precision that was asked for, and no other."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kimicore.kernels.packed_linear.layout import PackedWeight
from kimicore.kernels.packed_linear.reference import unpack
from kimicore.kernels.registry import select_ops
from kimicore.model.load import open_source
from kimicore.model.modules import modules_of
from kimicore.model.packed.rounding import round_to_nearest
from kimicore.model.products import Stack
from kimicore.model.spec import spec_from_config
from kimicore.model.transformer import Transformer
from kimicore.policies.precision import PRECISIONS, ResolvedMap
from kimicore.policies.precision.named import policy_named, resolved_by

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the rigs

from rigs.tiny import make_tiny

BODY = {"*.mlp.*_proj": "int4-g32", "*.self_attn.*_proj": "int8"}


def tied_folder(folder: Path) -> Path:
    """A model whose files have no output matrix."""
    make_tiny(folder, tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    return folder


def rounded(source: Any, table: str | None) -> tuple[Transformer, ResolvedMap]:
    """A model whose layers are rounded and whose embedding has the precision ``table``, None: what the map leaves."""
    spec = spec_from_config(source.config)
    patterns = BODY if table is None else {**BODY, "embed_tokens": table}
    found = resolved_by(policy_named("custom", {"patterns": patterns}), modules_of(spec))
    ops = select_ops("cpu", torch.float32, native=False)
    return Transformer.load(spec, source, ops, torch.float32, packed=True, precision=found), found


def values(weight: Any) -> Tensor:
    """What a weight means, in float32."""
    if isinstance(weight, Stack):
        return torch.cat([values(part) for part in weight.parts])
    return unpack(weight, torch.float32) if isinstance(weight, PackedWeight) else weight


@pytest.mark.parametrize("table", [None, "bfloat16", "int8", "int4-g64"])
def test_a_tied_head_has_its_embedding_s_precision(table: str | None, tmp_path: Path) -> None:
    """huggingface/transformers#37905: rounding the layers or the embedding of a tied model changes nothing else: every
    matrix means what the reported map says of it, and an output matrix that the map leaves in floats adds no error."""
    source = open_source(tied_folder(tmp_path / "tied"))
    model, found = rounded(source, table)
    assert model.weights.head is model.weights.embedding

    def expected(name: str) -> Tensor:
        plain: Tensor = source.read(f"model.{name}.weight", torch.float32)
        precision = found.precision(name)
        if PRECISIONS[precision].kind == "float":
            return plain
        return unpack(round_to_nearest(plain, precision), torch.float32)

    assert torch.equal(values(model.weights.embedding), expected("embed_tokens"))
    for index, layer in enumerate(model.weights.layers):
        at = f"layers.{index}"
        attention = torch.cat([expected(f"{at}.self_attn.{name}_proj") for name in "qkv"])
        assert torch.equal(values(layer.qkv), attention)
        assert torch.equal(values(layer.output), expected(f"{at}.self_attn.o_proj"))
        assert torch.equal(values(layer.gate_up), torch.cat([expected(f"{at}.mlp.{n}_proj") for n in ("gate", "up")]))
        assert torch.equal(values(layer.down), expected(f"{at}.mlp.down_proj"))
    hidden = torch.randn((3, 64), generator=torch.Generator().manual_seed(2))
    plain = Transformer.load(model.spec, source, model.ops, torch.float32)
    exact = found.precision("embed_tokens") == "bfloat16"
    assert torch.equal(model.logits(hidden), plain.logits(hidden)) == exact


def test_a_head_of_its_own_is_not_rounded_with_the_embedding(tmp_path: Path) -> None:
    """huggingface/transformers#37905: where they are not tied, a rounded embedding leaves the output matrix alone."""
    source = open_source(make_tiny(tmp_path / "model"))
    model, found = rounded(source, "int8")
    assert found.precision("lm_head") == "bfloat16"
    assert isinstance(model.weights.embedding, PackedWeight)
    assert torch.equal(values(model.weights.head), source.read("lm_head.weight", torch.float32))
