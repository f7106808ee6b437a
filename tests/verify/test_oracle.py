"""A report's figures against transformers on the same weights, computed text by text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from kimicore.verify import Measured, ModelChoice, Scorer, built_in
from kimicore.verify.tally import similarity

PROMPTS, NEW, TEXT = 10, 12, 300


class Oracle:
    """A model of transformers, one text at a time."""

    def __init__(self, folder: Path, tokens: int) -> None:
        self.tokens = tokens
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def log_probabilities(self, ids: Sequence[int]) -> Tensor:
        """Of the next token at each position [T, V], over the ids that texts have, in float64."""
        with torch.inference_mode():
            logits = self.model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
        return logits[:, : self.tokens].double().log_softmax(-1)

    def continuation(self, prompt: Sequence[int]) -> list[int]:
        ids = list(prompt)
        for _ in range(NEW):
            ids.append(int(self.log_probabilities(ids)[-1].argmax()))
        return ids[len(prompt) :]


@pytest.fixture(params=["llama", "gemma"])
def folder(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


def test_figures_are_those_of_transformers(
    folder: Path, changed: Callable[..., Path], noisy: Callable[[float], Any]
) -> None:
    """Continuations, agreement, KL, edit similarity and perplexity are what transformers gives for the same weights."""
    candidate = changed(folder, "layers.1.mlp", noisy(0.3))
    with Scorer(folder, prompts=PROMPTS, new_tokens=NEW, prompt_tokens=70, text_tokens=TEXT) as scorer:
        measured, told = scorer.score_model(ModelChoice(candidate))
        found, tokenizer, tokens = scorer.continuations, scorer.baseline.tokenizer, scorer.baseline.known_tokens
    assert told.model == str(candidate)
    baseline, other = Oracle(folder, tokens), Oracle(candidate, tokens)
    prompts = [(one.category, tokenizer.encode(one.text)[:70]) for one in built_in(PROMPTS).prompts]
    assert [list(one) for one in found] == [baseline.continuation(prompt) for _, prompt in prompts]
    agree, kl, edit = [], [], []
    for (_, prompt), continued in zip(prompts, found, strict=True):
        p, q = (one.log_probabilities([*prompt, *continued[:-1]])[len(prompt) - 1 :] for one in (baseline, other))
        assert p.argmax(-1).tolist() == list(continued)
        agree.append(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
        kl.append(float((p.exp() * (p - q)).sum(-1).mean()))
        edit.append(similarity(other.continuation(prompt), continued))
    check(measured, None, agree, kl, edit)
    for category in measured.by_category:
        mine = [at for at, (own, _) in enumerate(prompts) if own == category]
        check(measured, category, *([values[at] for at in mine] for values in (agree, kl, edit)))
    head = [tokenizer.bos_id] if tokenizer.add_bos else []
    for category, text in built_in(PROMPTS).texts.items():
        ids = tokenizer.encode(text, add_bos=False)[:TEXT]
        scores = measured.by_category[category]
        for oracle, value in ((baseline, scores.baseline_perplexity), (other, scores.perplexity)):
            assert value == pytest.approx(perplexity(oracle, ids, head, 70 + NEW), rel=1e-4)


def check(measured: Measured, category: str | None, agree: list[float], kl: list[float], edit: list[float]) -> None:
    scores = measured.all if category is None else measured.by_category[category]
    assert scores.prompts == len(agree)
    assert scores.positions == NEW * len(agree)
    assert scores.agreement.value == pytest.approx(sum(agree) / len(agree), abs=1e-9)
    assert scores.kl.value == pytest.approx(sum(kl) / len(kl), rel=1e-3, abs=1e-6)
    assert scores.edit is not None
    assert scores.edit.value == pytest.approx(sum(edit) / len(edit), abs=1e-9)


def perplexity(oracle: Oracle, ids: list[int], head: list[int], size: int) -> float:
    """Over windows of a text, each with the model's first token before it where it has one."""
    losses: list[float] = []
    for start in range(0, len(ids), size):
        window = [*head, *ids[start : start + size]]
        if len(window) > 1:
            found = oracle.log_probabilities(window)[:-1]
            losses += (-found[torch.arange(len(window) - 1), torch.tensor(window[1:])]).tolist()
    return math.exp(sum(losses) / len(losses))
