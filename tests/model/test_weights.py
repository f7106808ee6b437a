"""Loading weights: every name and shape is checked first, parts are fused, nothing is held twice."""

from __future__ import annotations

import re
import weakref
from typing import Any

import pytest
import tokenizers
import torch

from kimicore.errors import ModelLoadError
from kimicore.kernels.registry import select_ops
from kimicore.model.safetensors_source import SafetensorsSource
from kimicore.model.spec import spec_from_config
from kimicore.model.transformer import Transformer


def load(source: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Transformer:
    ops = select_ops("cpu", dtype, native=False)
    return Transformer.load(spec_from_config(source.config), source, ops, dtype, **kwargs)


@pytest.fixture
def source(tiny: Any) -> Any:
    return tiny("llama").source()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("model.norm.weight"), "missing tensors: model.norm.weight"),
        (lambda t: t.pop("lm_head.weight"), "missing tensors: lm_head.weight .tie_word_embeddings is false"),
        (lambda t: t.update({"model.layers.3.x": t["model.norm.weight"]}), "has not: model.layers.3.x"),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(96)}),
            "has not: model.layers.0.self_attn.q_proj.bias",
        ),
        (
            lambda t: t.update({"model.layers.1.mlp.up_proj.weight": torch.zeros(48, 80)}),
            re.escape("model.layers.1.mlp.up_proj.weight is [48, 80], expected [80, 48]"),
        ),
        (
            lambda t: t.update({"model.embed_tokens.weight": torch.zeros(130, 48)}),
            re.escape("model.embed_tokens.weight is [130, 48], expected at least [131, 48]"),
        ),
    ],
)
def test_refused_before_anything_is_read(change: Any, named: str, source: Any) -> None:
    """A missing, unexpected or wrongly shaped tensor is a load error that names it, before any tensor is read."""
    change(source.tensors)
    with pytest.raises(ModelLoadError, match=named):
        load(source)
    assert source.reads == []


def test_known_buffers_are_ignored(source: Any) -> None:
    """Rotary buffers of old checkpoints are neither read nor refused."""
    source.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    load(source)
    assert not any("inv_freq" in name for name in source.reads)


def test_each_tensor_is_read_once_and_progress_ends_at_the_total(source: Any) -> None:
    """Loading reads every tensor once and reports its progress up to exactly the total."""
    seen: list[tuple[str, int, int]] = []
    model = load(source, progress=lambda *args: seen.append(args))
    assert sorted(source.reads) == sorted(source.names())
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1] == ("weights", model.weight_bytes, model.weight_bytes)


def test_loading_changes_no_global_state(source: Any) -> None:
    """Loading leaves torch's default dtype, grad mode, thread count and random state alone."""

    def state() -> tuple[Any, ...]:
        return (
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.get_num_threads(),
            bytes(torch.get_rng_state().tolist()),
        )

    before = state()
    model = load(source, torch.bfloat16)
    assert state() == before
    assert model.weights.layers[0].qkv.dtype == torch.bfloat16


def test_tied_with_an_output_matrix_of_its_own(tiny: Any) -> None:
    """A tied model whose file has an output matrix shares one table where they are equal, else it uses both."""
    made = tiny("llama", tie_word_embeddings=True)
    source = made.source()
    source.tensors["lm_head.weight"] = source.tensors["model.embed_tokens.weight"].clone()
    shared = load(source).weights
    assert shared.head.data_ptr() == shared.embedding.data_ptr()
    source.tensors["lm_head.weight"] = source.tensors["lm_head.weight"] + 1.0
    apart = load(source).weights
    assert torch.equal(apart.head, source.tensors["lm_head.weight"])
    assert not torch.equal(apart.head, apart.embedding)


def test_padded_vocabulary(tiny: Any) -> None:
    """Rows behind the vocabulary are cut, and ids that the tokenizer does not know have no chance."""
    made = tiny("llama")
    source = made.source()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        source.tensors[name] = torch.cat([source.tensors[name], torch.full((29, 48), torch.nan)])
    hidden = torch.randn(3, 48, generator=torch.Generator().manual_seed(0))
    logits = load(source, known_tokens=120).logits(hidden)
    assert logits.shape == (3, 131)
    assert logits[:, :120].isfinite().all()
    assert (logits[:, 120:] == -torch.inf).all()
    assert load(source).logits(hidden).isfinite().all()


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", ""])
def test_prefixes_of_multimodal_and_bare_files(prefix: str, tiny: Any) -> None:
    """Weights load under the prefixes of multimodal and bare checkpoints; the other half of the file is left."""
    made = tiny("gemma3_text", sliding_window=8)
    plain = made.source()
    tensors = {name.replace("model.", prefix, 1): tensor for name, tensor in plain.tensors.items()}
    tensors["vision_tower.vision_model.post_layernorm.weight"] = torch.zeros(4)
    tensors["multi_modal_projector.mm_soft_emb_norm.weight"] = torch.zeros(4)
    named = type(plain)({"model_type": "gemma3", "text_config": made.config}, tensors)
    assert torch.equal(load(named).weights.layers[0].qkv, load(plain).weights.layers[0].qkv)


def test_last_layer_only_for_selected_tokens(tiny: Any, prompt: Any) -> None:
    """Hidden states of chosen tokens are those of all tokens; a chunk that wants none gives none."""
    made = tiny("qwen3")
    bench = made.bench()
    tokens = prompt(40)
    everything = bench.whole(tokens)
    row = bench.row(tokens)
    assert bench.run([(row, 20)], selected="none")[0].shape == (0, 131)
    last = bench.run([(row, 20)], selected="last")[0]
    assert torch.allclose(last, everything[-1:], rtol=0, atol=1e-5)


def test_parts_of_a_fused_weight_are_dropped(source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """While weights are fused, no part outlives its copy: peak memory is the weights and one tensor more."""
    parts: list[weakref.ref[torch.Tensor]] = []
    fused = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    plain = source.read

    def read(name: str, dtype: torch.dtype) -> torch.Tensor:
        assert all(part() is None for part in parts)
        tensor = plain(name, dtype)
        if any(part in name for part in fused):
            parts.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(source, "read", read)
    load(source)
    assert len(parts) == 5 * 3
    assert all(part() is None for part in parts)


def test_from_a_folder(tiny: Any, prompt: Any, bench_of: Any) -> None:
    """A folder that transformers saved loads as it lies there, and gives the same logits as its tensors do."""
    made = tiny("gemma3_text", sliding_window=8, sliding_window_pattern=2)
    words = {f"w{i}": i for i in range(131)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")).save(str(made.folder / "tokenizer.json"))
    from_folder = bench_of(load(SafetensorsSource(made.folder)))
    assert torch.equal(from_folder.whole(prompt(20)), made.bench().whole(prompt(20)))
