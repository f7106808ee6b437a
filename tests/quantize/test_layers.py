"""A layer at a time: the forward pass is the model's own, and scaling alone changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from tests.quantize.conftest import CLASSES
from torch import Tensor

from kimicore.kernels.packed_linear.layout import PackedWeight
from kimicore.model.load import open_source
from kimicore.model.modules import modules_of
from kimicore.policies.precision.named import policy_named, resolved_by
from kimicore.quantize.decoder import Decoder
from kimicore.quantize.layers import LayerRounding, stored_weight
from kimicore.quantize.methods import QuantizeSettings
from kimicore.quantize.reading import ModelReader

TOKENS = 60  # longer than the sliding windows


def ids(rows: int = 3, seed: int = 0) -> Tensor:
    return torch.randint(3, 300, (rows, TOKENS), generator=torch.Generator().manual_seed(seed))


def whole_logits(reader: ModelReader, layers: list[dict[str, Tensor]], token_ids: Tensor) -> Tensor:
    decoder = Decoder.make(reader.spec, token_ids.shape[1])
    table = reader.embedding()
    head = reader.own_head()
    hidden = decoder.embed(table, token_ids)
    for index, weights in enumerate(layers):
        hidden = decoder.layer(hidden, weights, index)
    return decoder.logits(hidden, reader.final_norm(), table if head is None else head)


@pytest.mark.parametrize("name", list(CLASSES))
def test_the_forward_pass_is_the_model_s(name: str, family: Callable[..., Path]) -> None:
    """Every family's logits are those of transformers: windows, caps, norms of queries, sandwiches, biases."""
    folder = family(name)
    reader = ModelReader.of(open_source(folder))
    layers = [reader.layer(index) for index in range(len(reader.spec.layers))]
    with torch.inference_mode():
        oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids()).logits
        found = whole_logits(reader, layers, ids())
    torch.testing.assert_close(found, oracle, rtol=1e-3, atol=2e-3)


def rounded(
    reader: ModelReader, method: str, precision: str = "int4-g32", policy: str = "asymmetric"
) -> list[dict[str, Tensor | PackedWeight]]:
    key = "weights" if policy == "uniform" else "ffn"
    found = resolved_by(policy_named(policy, {key: precision}), modules_of(reader.spec))
    precisions = {one.module.name: one.precision for one in found.modules}
    rounding = LayerRounding(Decoder.make(reader.spec, TOKENS), precisions, QuantizeSettings(method=method))
    hidden = rounding.decoder.embed(reader.embedding(), ids(12, seed=4)) if method != "nearest" else None
    layers = []
    with torch.inference_mode():
        for index in range(len(reader.spec.layers)):
            stored, hidden = rounding.quantize(index, reader.layer(index), hidden)
            layers.append(stored)
    return layers


@pytest.mark.parametrize("method", ["awq", "gptq", "awq-gptq"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text"])
def test_each_method_loses_less_than_rounding(name: str, method: str, family: Callable[..., Path]) -> None:
    """On held-out tokens, the distributions of a calibrated model are nearer than those of a rounded one."""
    reader = ModelReader.of(open_source(family(name)))
    plain = [reader.layer(index) for index in range(len(reader.spec.layers))]
    with torch.inference_mode():
        wanted = whole_logits(reader, plain, ids()).log_softmax(-1)
        losses = {}
        for one in ("nearest", method):
            layers = [{key: stored_weight(value) for key, value in own.items()} for own in rounded(reader, one)]
            found = whole_logits(reader, layers, ids()).log_softmax(-1)
            losses[one] = float((wanted.exp() * (wanted - found)).sum(-1).mean())
    assert losses[method] < 0.98 * losses["nearest"], losses  # random weights have little to gain by


@pytest.mark.parametrize("name", list(CLASSES))
@pytest.mark.parametrize("policy", ["asymmetric", "uniform"])
def test_scaling_alone_changes_nothing(
    name: str, policy: str, family: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is rounded after it, a scaled model is the same function: norms, 1 + w, biases and rows."""
    from kimicore.quantize import layers as module

    reader = ModelReader.of(open_source(family(name)))
    plain = [reader.layer(index) for index in range(len(reader.spec.layers))]
    monkeypatch.setattr(module, "round_matrix", lambda weight, *rest: weight)
    monkeypatch.setattr(module, "kept_as", lambda weight, *rest: weight)
    scaled = rounded(reader, "awq", "int4-g32", policy)
    changed = [key for key, value in scaled[0].items() if not torch.equal(value, plain[0][key])]  # type: ignore[arg-type]
    assert {"mlp.up_proj.weight", "mlp.down_proj.weight", "mlp.gate_proj.weight"} <= set(changed)
    assert ("self_attn.q_proj.weight" in changed) == (policy == "uniform")
    with torch.inference_mode():
        wanted = whole_logits(reader, plain, ids())
        found = whole_logits(reader, scaled, ids())  # type: ignore[arg-type]
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=5e-3)


def test_what_the_map_leaves_stays_as_it_is(family: Callable[..., Path]) -> None:
    """With error compensation, everything that is not rounded is the source's, in the map's float type."""
    reader = ModelReader.of(open_source(family("qwen3")))
    for index, own in enumerate(rounded(reader, "gptq")):
        for key, value in own.items():
            packed = key.startswith("mlp.")
            assert isinstance(value, PackedWeight) == packed
            if not packed:
                assert torch.equal(value, reader.layer(index)[key].to(torch.bfloat16))  # type: ignore[arg-type]
