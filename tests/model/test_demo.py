"""The demo models, from their GGUF files, against transformers reading the same files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from kimicore.kernels.registry import select_ops
from kimicore.model.gguf_source import GGUFSource
from kimicore.model.spec import spec_from_config
from kimicore.model.transformer import Transformer

KEPT = 40


@pytest.fixture(scope="module", params=["smollm2_path", "gemma_path"])
def demo(request: pytest.FixtureRequest) -> tuple[Transformer, dict[str, Any]]:
    """Return the model here and its two oracles."""
    path: Path = request.getfixturevalue(request.param)
    source = GGUFSource(path)
    model = Transformer.load(
        spec_from_config(source.config), source, select_ops("cpu", torch.float32, native=True), torch.float32
    )
    parsed = load_gguf_checkpoint(str(path))["config"]
    config = transformers.AutoConfig.for_model(**parsed)
    kind = transformers.AutoModelForCausalLM
    with torch.device("meta"):  # for its tensors' names alone
        named = kind.from_config(config)
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=named)["tensors"]
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    oracles = {
        name: type(named)
        .from_pretrained(None, config=config, state_dict=tensors, dtype=torch.float32, attn_implementation=name)
        .eval()
        for name in ("eager", "sdpa")
    }
    return model, oracles


def expected(oracles: dict[str, Any], tokens: list[int]) -> tuple[torch.Tensor, float]:
    ids = torch.tensor([tokens])
    with torch.inference_mode():
        eager, sdpa = (m(input_ids=ids, use_cache=False, logits_to_keep=KEPT).logits[0] for m in oracles.values())
    return eager, max(5e-4, 3 * float((eager - sdpa).abs().max()))


@pytest.mark.parametrize("count", [1, 30, 700])
def test_logits(count: int, demo: Any, bench_of: Any, close: Any) -> None:
    """The last logits of prompts of 1, 30 and 700 tokens are those of transformers, whole and in chunks."""
    model, oracles = demo
    bench = bench_of(model)
    tokens = torch.randint(5, 40_000, (count,), generator=torch.Generator().manual_seed(count)).tolist()
    wanted = expected(oracles, tokens)
    close(bench.run([(bench.row(tokens), count)], selected=KEPT)[0], wanted, "whole")
    if count > KEPT:
        row = bench.row(tokens)
        for start in range(0, count - KEPT, 100):
            bench.run([(row, min(100, count - KEPT - start))], selected="none")
        close(bench.run([(row, KEPT)])[0], wanted, "chunks of 100")


def test_greedy_tokens_in_a_batch(demo: Any, bench_of: Any) -> None:
    """Twelve greedy tokens of three rows in one batch are those that transformers generates for each alone."""
    model, oracles = demo
    bench = bench_of(model)
    prompts = [torch.randint(5, 40_000, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (3, 20, 64)]
    rows = [bench.row(tokens) for tokens in prompts]
    logits = bench.run([(row, len(row.tokens)) for row in rows], selected="last")
    for _ in range(12):
        for row, scores in zip(rows, logits, strict=True):
            row.tokens.append(int(scores[-1].argmax()))
        logits = bench.run([(row, 1) for row in rows], selected="last")
    for tokens, row in zip(prompts, rows, strict=True):
        with torch.inference_mode():
            ids = torch.tensor([row.tokens])
            scores = oracles["eager"](input_ids=ids, use_cache=False, logits_to_keep=13).logits[0, :-1]
        assert row.tokens[len(tokens) :] == scores.argmax(dim=-1).tolist()
