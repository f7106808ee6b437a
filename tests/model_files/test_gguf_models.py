"""A model in a GGUF file is the model that transformers knows: same config, names and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from kimicore.errors import ModelLoadError
from kimicore.model.gguf_source import GGUFSource
from kimicore.model.load import open_source

from .forge import TOKENS, pair, tiny_arrays, tiny_gguf, vocabulary
from .forge import gguf as write_gguf

SIZES: dict[str, Any] = {
    "vocab_size": len(TOKENS),
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
OTHERS = ("model_type", "tie_word_embeddings", "sliding_window", "layer_types", "query_pre_attn_scalar", "pad_token_id")
ARCHITECTURES: dict[str, tuple[Any, dict[str, Any], gguf.MODEL_ARCH]] = {
    "llama": (transformers.LlamaConfig, {}, gguf.MODEL_ARCH.LLAMA),
    "llama-bias": (transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True}, gguf.MODEL_ARCH.LLAMA),
    "llama-tied": (transformers.LlamaConfig, {"tie_word_embeddings": True}, gguf.MODEL_ARCH.LLAMA),
    "qwen2": (transformers.Qwen2Config, {"head_dim": 6}, gguf.MODEL_ARCH.QWEN2),
    "qwen3": (transformers.Qwen3Config, {}, gguf.MODEL_ARCH.QWEN3),
    "gemma3": (
        transformers.Gemma3TextConfig,
        {"sliding_window": 16, "query_pre_attn_scalar": 8},
        gguf.MODEL_ARCH.GEMMA3,
    ),
}


def _oracle(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    kind, changes, _ = ARCHITECTURES[name]
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(kind(**{**SIZES, **changes}))
    state = model.state_dict()
    for tensor in state.values():  # norms and biases begin as ones and zeros, which would hide mistakes
        tensor.normal_()
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return model, state


def _interleaved(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Order rows as the converter of llama.cpp does for its rope."""
    half = tensor.shape[0] // heads // 2
    return tensor.reshape(heads, 2, half, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def _convert(name: str, config: Any, state: dict[str, torch.Tensor], path: Path) -> None:
    number = ARCHITECTURES[name][2]
    architecture = gguf.MODEL_ARCH_NAMES[number]
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    arrays = {}
    for key, tensor in state.items():
        if architecture == "llama" and key.split(".")[-2] in ("q_proj", "k_proj"):
            query = key.split(".")[-2] == "q_proj"
            tensor = _interleaved(tensor, config.num_attention_heads if query else config.num_key_value_heads)
        if architecture == "gemma3" and key.endswith("norm.weight"):
            tensor = tensor + 1
        stored = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert stored is not None
        arrays[stored] = tensor.numpy()
    values: dict[str, Any] = {
        "block_count": ("u32", config.num_hidden_layers),
        "embedding_length": ("u32", config.hidden_size),
        "feed_forward_length": ("u32", config.intermediate_size),
        "attention.head_count": ("u32", config.num_attention_heads),
        "attention.head_count_kv": ("u32", [config.num_key_value_heads] * config.num_hidden_layers),
        "attention.layer_norm_rms_epsilon": ("f32", config.rms_norm_eps),
        "context_length": ("u32", config.max_position_embeddings),
    }
    if architecture != "qwen2":
        values |= {"attention.key_length": ("u32", 8), "attention.value_length": ("u32", 8)}
    if architecture == "gemma3":
        values["attention.sliding_window"] = ("u32", config.sliding_window)
    pairs = [pair("general.architecture", "str", architecture)]
    pairs += [pair(f"{architecture}.{key}", *value) for key, value in values.items()]
    path.write_bytes(write_gguf([*pairs, *vocabulary()], arrays))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_round_trips(name: str, tmp_path: Path) -> None:
    """Names, shapes, values and config of a converted model are those of the original, from GGUF and safetensors."""
    model, state = _oracle(name)
    config = model.config
    _convert(name, config, state, tmp_path / "model.gguf")
    model.save_pretrained(tmp_path / "folder")
    (tmp_path / "folder/tokenizer.json").write_text("{}")
    plain = open_source(tmp_path / "folder")
    source = open_source(tmp_path / "model.gguf")
    for opened, exact in ((source, name != "gemma3"), (plain, True)):
        assert sorted(opened.names()) == sorted(state)
        for key, expected in state.items():
            assert opened.shape(key) == tuple(expected.shape)
            actual = opened.read(key, torch.float32)
            # Adding one to a norm and taking it off again rounds once.
            assert torch.equal(actual, expected) if exact else torch.allclose(actual, expected, atol=1e-6), key
            assert torch.equal(opened.read(key, torch.bfloat16), actual.to(torch.bfloat16)), key
    for key in (*SIZES, "tie_word_embeddings", "rms_norm_eps", "model_type", "layer_types", "sliding_window"):
        if key in source.config and source.config[key] is not None:
            assert source.config[key] == getattr(config, key), key
    if name == "gemma3":
        assert source.config["layer_types"] == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
        assert source.config["query_pre_attn_scalar"] == 8
        assert source.config["rope_local_base_freq"] == config.rope_parameters["sliding_attention"]["rope_theta"]
        assert source.config["rope_theta"] == config.rope_parameters["full_attention"]["rope_theta"]
    if name == "llama-bias":
        assert source.config["attention_bias"]
        assert source.config["mlp_bias"]


@pytest.mark.parametrize("fixture", ["smollm2_path", "gemma_path"])
def test_demo_models_equal_transformers(fixture: str, request: pytest.FixtureRequest) -> None:
    """Every tensor of the demo models is bit for bit what transformers makes of the same file."""
    path: Path = request.getfixturevalue(fixture)
    source = GGUFSource(path)
    # The empty model only lends its names; what transformers reads as the config is compared below.
    config = transformers.CONFIG_MAPPING[source.config["model_type"]](**source.config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    parsed = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    tensors = parsed["tensors"]
    assert set(source.names()) == set(model.state_dict()) - {"lm_head.weight"}
    for name in source.names():
        assert torch.equal(source.read(name, torch.float32), tensors.pop(name)), name
    config = transformers.CONFIG_MAPPING[parsed["config"]["model_type"]](**parsed["config"])
    for key in (*SIZES, *OTHERS):
        if hasattr(config, key):
            assert source.config[key] == getattr(config, key), key
    assert source.config["rms_norm_eps"] == pytest.approx(config.rms_norm_eps, rel=1e-7)
    assert source.config["eos_token_id"] == [config.eos_token_id]


def test_text_side_of_the_demo_models(smollm2_path: Path, gemma_path: Path) -> None:
    """Vocabulary, template and special ids of the demo models are read as their files have them."""
    text = GGUFSource(smollm2_path).text
    assert text.gguf is not None
    assert (text.gguf.model, text.gguf.pre, len(text.gguf.tokens), len(text.gguf.merges)) == (
        "gpt2",
        "smollm",
        49152,
        48900,
    )
    assert (text.bos_id, text.eos_ids, text.pad_id, text.add_bos) == (1, (2,), 2, False)
    assert text.gguf.tokens[2] == "<|im_end|>"
    assert text.gguf.types[2] == 3
    assert text.chat_template is not None
    assert "<|im_start|>" in text.chat_template
    text = GGUFSource(gemma_path).text
    assert text.gguf is not None
    assert (text.gguf.model, len(text.gguf.tokens), len(text.gguf.merges)) == ("llama", 262144, 0)
    assert (text.bos_id, text.eos_ids, text.pad_id, text.add_bos) == (2, (1,), 0, True)
    assert text.gguf.tokens[106] == "<end_of_turn>"
    assert text.gguf.tokens[238 + 65] == "<0x41>"
    assert not text.gguf.add_space_prefix
    assert text.gguf.scores is not None
    assert len(text.gguf.scores) == len(text.gguf.types) == 262144
    assert text.chat_template is None


def test_reading_takes_little_beside_the_result(gemma_path: Path) -> None:
    """The largest tensor is dequantized in blocks, with under 32 MB beside the result."""
    import tracemalloc

    source = GGUFSource(gemma_path)
    tracemalloc.start()  # counts numpy's memory; the result itself is torch's
    try:
        embedding = source.read("model.embed_tokens.weight", torch.bfloat16)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    assert embedding.shape == (262144, 640)


def _refused(tmp_path: Path, content: bytes, match: str) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(ModelLoadError, match=match):
        GGUFSource(tmp_path / "model.gguf")


def test_the_wrong_architecture_is_named(gemma_path: Path, tmp_path: Path) -> None:
    """ggml-org/llama.cpp#5636: the error names the architecture and what is missing, never a puzzling tensor."""
    content = gemma_path.read_bytes()
    # The name below is a byte longer, so that everything behind it stays where it was.
    for before, after in (
        (("general.architecture", "gemma3"), "llama"),
        (("general.name", "Gemma 3 270m"), "Gemma 3 270m!"),
    ):
        key, value = before
        assert content.count(pair(key, "str", value)) == 1
        content = content.replace(pair(key, "str", value), pair(key, "str", after))
    _refused(tmp_path, content, r"llama.block_count: is missing: general.architecture is 'llama'.*keys are of gemma3")
    supported = "supported are gemma3, llama, qwen2, qwen3"
    _refused(tmp_path, tiny_gguf("mamba2"), f"general.architecture: 'mamba2' is not supported; {supported}")
    _refused(tmp_path, write_gguf(vocabulary(), {}), f"general.architecture: is missing; {supported}")
    _refused(
        tmp_path, tiny_gguf("qwen3"), r"'qwen3' needs tensors that are missing: blk.0.attn_q_norm.weight, blk.0.attn_k"
    )
    _refused(tmp_path, tiny_gguf("qwen2"), "'qwen2' needs tensors that are missing: blk.0.attn_q.bias")


def test_tensors_of_another_architecture_are_refused(tmp_path: Path) -> None:
    """ggml-org/llama.cpp#5636: tensors that the named architecture does not have are not silently left out."""
    arrays = {**tiny_arrays(), "blk.0.attn_q_norm.weight": np.ones(4, dtype=np.float32)}
    _refused(tmp_path, tiny_gguf(arrays=arrays), "'llama' does not have the file's tensors: blk.0.attn_q_norm.weight")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"block_count": ("u32", 1 << 30)}, "block_count: is 1073741824, but the file has 11 tensors"),
        ({"block_count": ("u32", 2)}, "needs tensors that are missing: blk.1.attn_norm.weight"),
        ({"block_count": ("u32", 0)}, "block_count: is 0; must be from 1"),
        ({"block_count": ("str", "1")}, "block_count: must be one integer, is string"),
        ({"embedding_length": ("u32", 16)}, r"'token_embd.weight': has shape \[264, 8\], expected \[264, 16\]"),
        ({"feed_forward_length": ("u32", [16, 16])}, None),
        ({"feed_forward_length": ("u32", [16, 8])}, "must be one integer, is array of u32"),
        ({"attention.head_count": ("u32", 3)}, "3 does not divide 8"),
        ({"attention.head_count_kv": ("u32", 3)}, "3 does not divide the 2 query heads"),
        ({"attention.key_length": ("u32", 6)}, "value_length: must be 6|expected"),
        ({"attention.value_length": ("u32", 6)}, "value_length: must be 4"),
        ({"attention.layer_norm_rms_epsilon": ("f32", float("nan"))}, "is nan; must be finite"),
        ({"attention.layer_norm_rms_epsilon": None}, "is missing"),
        ({"rope.dimension_count": ("u32", 6)}, "must be even and at most 4"),
        ({"vocab_size": ("u32", 300)}, "does not agree with the 264 rows"),
        ({"expert_count": ("u32", 8)}, "mixture-of-experts"),
        ({"rope.scaling.type": ("str", "longrope")}, "'longrope' is not supported"),
        ({"rope.scaling.type": ("str", "linear")}, "rope.scaling.factor: is missing"),
    ],
)
def test_sizes_are_checked_against_the_file(changes: dict[str, Any], match: str | None, tmp_path: Path) -> None:
    """A config that does not fit the tensors is refused by its key."""
    content = tiny_gguf(**changes)
    if match is not None:
        _refused(tmp_path, content, match)
        return
    (tmp_path / "model.gguf").write_bytes(content)
    assert GGUFSource(tmp_path / "model.gguf").config["intermediate_size"] == 16


def _scaling(tmp_path: Path, factors: np.ndarray | None = None, **changes: Any) -> Any:
    arrays = tiny_arrays() | ({} if factors is None else {"rope_freqs.weight": factors})
    heads = {"attention.head_count": ("u32", 1), "attention.head_count_kv": ("u32", 1)}
    for name, shape in (("attn_k", (8, 8)), ("attn_v", (8, 8))):
        arrays[f"blk.0.{name}.weight"] = np.ones(shape, dtype=np.float32)
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_gguf(arrays=arrays, **heads, **changes))
    return GGUFSource(path).config["rope_scaling"]


def test_rope_scaling_keys(tmp_path: Path) -> None:
    """Linear and yarn scaling come back with the names that a config.json has."""
    kind = "rope.scaling.type"
    assert _scaling(tmp_path, **{kind: ("str", "none")}) is None
    linear = {"rope_type": "linear", "factor": 4.0}
    assert _scaling(tmp_path, **{kind: ("str", "linear"), "rope.scaling.factor": ("f32", 4.0)}) == linear
    assert _scaling(tmp_path, **{"rope.scale_linear": ("f32", 4.0)}) == linear
    yarn = {kind: ("str", "yarn"), "rope.scaling.factor": ("f32", 4.0)}
    yarn["rope.scaling.original_context_length"] = ("u32", 32)
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert _scaling(tmp_path, **yarn) == expected
    assert _scaling(tmp_path, **yarn, **{"rope.scaling.yarn_beta_fast": ("f32", 16.0)}) == {
        **expected,
        "beta_fast": 16.0,
    }


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_frequencies_give_the_rule_back(factor: float, tmp_path: Path) -> None:
    """The factors in a Llama 3 file give back the rule, and with it transformers' own frequencies."""
    base = 500000.0
    parameters = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = transformers.LlamaConfig(**SIZES, rope_parameters={**parameters, "rope_theta": base})
    scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = base ** -(torch.arange(4, dtype=torch.float64) / 4)
    factors = (plain / scaled).to(torch.float32).numpy()
    found = _scaling(tmp_path, factors, **{"rope.freq_base": ("f32", base)})
    assert found == parameters
    assert _scaling(tmp_path, np.ones(4, dtype=np.float32)) is None
    with pytest.raises(ModelLoadError, match=r"rope_freqs.weight: holds factors that do not follow"):
        _scaling(tmp_path, np.array([1, 2, 3, 4], dtype=np.float32))
    with pytest.raises(ModelLoadError, match=r"rope_freqs.weight: must hold finite numbers over 0"):
        _scaling(tmp_path, np.array([1, 0, 3, 4], dtype=np.float32))


def test_fingerprints_tell_models_apart(tmp_path: Path) -> None:
    """The fingerprint is the same for a copy and another for a changed weight, key or name."""
    content = tiny_gguf()
    prints = []
    for name, data in {
        "a": content,
        "copy": content,
        "weight": content[:-4] + b"\1\2\3\4",
        "key": tiny_gguf(context_length=("u32", 65)),
    }.items():
        (tmp_path / f"{name}.gguf").write_bytes(data)
        prints.append(GGUFSource(tmp_path / f"{name}.gguf").fingerprint)
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3
