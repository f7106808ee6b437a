"""The engine against ``transformers`` on both demo models in float32, and bfloat16 against float32."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
import transformers
from tests import corpus

import kimicore

NEW_TOKENS = 64
LEAST_TOLERANCE = 5e-4


class Oracle:
    """A demo model in ``transformers``, float32, with both of its attentions."""

    def __init__(self, path: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            dtype=torch.float32,
            quantization_config=transformers.GgufConfig(dequantize=True),
        ).eval()

    def logits(self, ids: list[int], attention: str) -> torch.Tensor:
        """Return the logits [T, V] of every position of ``ids``."""
        self.model.set_attn_implementation(attention)
        with torch.inference_mode():
            return self.model(torch.tensor([ids])).logits[0].float()


@pytest.fixture(scope="module", params=["smollm2", "gemma"])
def demo(request: pytest.FixtureRequest) -> tuple[Path, Oracle]:
    """A demo model's file and its oracle."""
    path: Path = request.getfixturevalue(f"{request.param}_path")
    return path, Oracle(path)


async def _run(path: Path, config: kimicore.EngineConfig, seeded: int) -> tuple[list[Any], list[Any], list[list[int]]]:
    """Return the results of all prompts alone, and then all at once with staggered arrival."""
    async with kimicore.Engine(path, config) as engine:
        prompts = corpus.prompts(engine.face.tokenizer, count=seeded, longest=1500 if seeded >= 50 else 300)
        options: dict[str, Any] = {"max_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}
        alone = [await engine.generate(ids, prompt_logprobs=0, **options) for ids in prompts]
        together: list[Any] = [None] * len(prompts)
        gate = anyio.CapacityLimiter(16)

        async def one(index: int) -> None:
            async with gate:
                together[index] = await engine.generate(prompts[index], tenant="together", **options)

        async with anyio.create_task_group() as group:
            for index in range(len(prompts)):
                group.start_soon(one, index)
                steps = engine.stats().steps
                while engine.stats().steps < steps + 2 and index < 16:  # arrivals fall into different steps
                    await anyio.sleep(0)
        return alone, together, prompts


@pytest.mark.parametrize("count", [pytest.param(4, id="some"), pytest.param(50, id="all", marks=pytest.mark.long)])
def test_greedy_tokens_and_scores_are_those_of_transformers(demo: tuple[Path, Oracle], count: int) -> None:
    """In float32 the engine's greedy tokens are the oracle's, alone and in staggered batches of 16, and its
    log-probabilities lie within the larger of 5e-4 and three times the oracle's own gap between two attentions.
    """
    path, oracle = demo
    config = kimicore.EngineConfig(dtype="float32", kv_device_bytes="2GiB", max_batch_size=16, max_batch_tokens=256)
    alone, together, prompts = anyio.run(_run, path, config, count)
    worst = 0.0
    for ids, single, crowd in zip(prompts, alone, together, strict=True):
        assert crowd.token_ids == single.token_ids
        full = [*ids, *single.token_ids]
        eager, sdpa = (oracle.logits(full, one) for one in ("eager", "sdpa"))
        # The oracle, fed with our tokens, would have chosen each of them: so its own greedy run gives the same.
        chosen = eager[len(ids) - 1 : -1].argmax(-1).tolist()
        assert tuple(chosen) == single.token_ids, f"prompt of {len(ids)} tokens"
        tolerance = max(LEAST_TOLERANCE, 3 * float((eager - sdpa).abs().max()))
        expected = torch.log_softmax(eager.double(), -1)
        known = torch.tensor(full[1:])
        scores = expected[:-1].gather(1, known[:, None])[:, 0]
        got = [one.logprob for one in (*single.prompt_logprobs[1:], *single.logprobs)]
        gap = float((scores - torch.tensor(got, dtype=torch.float64)).abs().max())
        worst = max(worst, gap / tolerance)
        assert gap <= tolerance, f"prompt of {len(ids)} tokens"
    print(f"{path.name}: {count} prompts, worst gap {worst:.3f} of the tolerance")


def test_generate_of_transformers_gives_the_same(demo: tuple[Path, Oracle]) -> None:
    """The oracle's own ``generate`` gives the engine's tokens, prompt by prompt."""
    path, oracle = demo
    compared = 0
    with kimicore.SyncEngine(path, kimicore.EngineConfig(dtype="float32")) as engine:
        for ids in corpus.prompts(engine.face.tokenizer, count=5, longest=200):
            ours = engine.generate(ids, max_tokens=24, temperature=0.0, ignore_eos=True)
            inputs = torch.tensor([ids])
            theirs = oracle.model.generate(
                inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=24, min_new_tokens=24, do_sample=False
            )
            ends = set(engine.face.tokenizer.eos_ids)
            if not ends & set(ours.token_ids):  # the oracle bans end tokens to reach the length
                assert tuple(theirs[0, len(ids) :].tolist()) == ours.token_ids
                compared += 1
    assert compared > 0


def perplexity(path: Path, dtype: str, tokens: int) -> float:
    """Return the perplexity of the fixed English text's first ``tokens`` tokens, in windows of 1,000."""
    config = kimicore.EngineConfig(dtype=dtype)
    with kimicore.SyncEngine(path, config) as engine:
        ids = engine.face.tokenizer.encode(corpus.text("alice.txt"))[:tokens]
        assert len(ids) == tokens
        windows = [ids[start : start + 1000] for start in range(0, tokens, 1000)]
        results = engine.generate_many(windows, max_tokens=0, prompt_logprobs=0)
    scores = [one.logprob for result in results for one in result.prompt_logprobs or () if one.logprob is not None]
    return math.exp(-sum(scores) / len(scores))


@pytest.mark.parametrize(
    "tokens", [pytest.param(2000, id="some"), pytest.param(20000, id="all", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("model", ["smollm2", "gemma"])
def test_bfloat16_reads_a_text_as_well_as_float32(model: str, tokens: int, request: pytest.FixtureRequest) -> None:
    """The perplexity of a fixed text in bfloat16 is within 0.5 % of that in float32."""
    path = request.getfixturevalue(f"{model}_path")
    full, half = (perplexity(path, dtype, tokens) for dtype in ("float32", "bfloat16"))
    print(f"{path.name}: perplexity of {tokens} tokens {full:.4f} in float32, {half:.4f} in bfloat16")
    assert abs(half / full - 1) <= 0.005
