"""Scores of candidates: the same model scores full marks, a damaged one does not, and many share one baseline."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kimicore.verify.scorer as scorer_module
from kimicore.errors import ConfigError, RequestFailed
from kimicore.kernels.registry import select_ops
from kimicore.model.load import open_source
from kimicore.model.spec import spec_from_config
from kimicore.model.transformer import Transformer
from kimicore.verify import ModelChoice, Scorer, verify

FEW: dict[str, Any] = {"prompts": 10, "new_tokens": 12, "text_tokens": 200}


def loaded(folder: Path) -> Transformer:
    """The model in float32, as a caller of the scorer may hold one."""
    source = open_source(folder)
    spec = spec_from_config(source.config)
    return Transformer.load(spec, source, select_ops("cpu", torch.float32), torch.float32, known_tokens=300)


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_a_model_against_itself_scores_full_marks(name: str, request: pytest.FixtureRequest) -> None:
    """In float32 a model agrees with itself at every position, its KL is 0 to rounding, and its texts are the same."""
    folder = request.getfixturevalue(name)
    report = verify(folder, folder, keep=False, **FEW)
    assert report.passed
    for scores in (report.scores.all, *report.by_category.values()):
        assert scores.agreement.value == scores.agreement.low == 1.0
        assert scores.kl.value < 1e-6
        assert scores.edit is not None
        assert scores.edit.value == 1.0
        assert scores.perplexity == pytest.approx(scores.baseline_perplexity, rel=1e-6)
    assert report.noise is not None
    assert report.noise.all.agreement.value > 0.8
    assert 0.0 < report.noise.all.kl.value < 0.1


def test_one_damaged_layer_fails(llama: Path, changed: Callable[..., Path], noisy: Callable[[float], Any]) -> None:
    """Noise in one layer's weights is a fail, whose reason names the figures and the worst category."""
    report = verify(llama, changed(llama, "layers.1.mlp.down_proj", noisy(0.5)), keep=False, **FEW)
    assert not report.passed
    assert report.scores.all.agreement.value < 0.95
    assert report.scores.all.kl.value > 0.01
    worst = min(report.by_category, key=lambda one: report.by_category[one].agreement.value)
    assert report.by_category[report.scores.worst].agreement == report.by_category[worst].agreement
    assert f"least in {report.scores.worst}" in report.reason


def test_the_category_that_is_damaged_shows(llama: Path, changed: Callable[..., Path]) -> None:
    """Where only the bytes of Chinese letters are damaged, the two Chinese categories lose most in all figures."""

    def change(name: str, tensor: Tensor) -> Tensor:
        damaged = tensor.clone()
        byte = {
            value: 3 + place for place, value in enumerate([*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 256)])
        }
        rows = [byte[value] for value in range(0xE4, 0xEA)]
        damaged[rows] = damaged[rows].flip(-1)
        return damaged

    with Scorer(llama, prompts=40, new_tokens=4, prompt_tokens=40, text_tokens=400) as scorer:
        measured = scorer.score(loaded(changed(llama, "embed_tokens", change)))
    chinese = {"chinese", "classical-chinese"}
    assert measured.worst in chinese
    for figure in ("agreement", "kl", "perplexity"):

        def rise(category: str, figure: str = figure) -> float:
            own = measured.by_category[category]
            if figure == "perplexity":
                return abs((own.perplexity or 0.0) / (own.baseline_perplexity or 1.0) - 1.0)
            return 1.0 - own.agreement.value if figure == "agreement" else own.kl.value

        inside = min(rise(one) for one in chinese)
        assert all(inside > rise(one) for one in measured.by_category if one not in chinese), figure


def test_one_baseline_serves_many_candidates(
    llama: Path, changed: Callable[..., Path], noisy: Callable[[float], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Candidates in memory are scored one after another, more damage scores less, and order makes no difference."""
    models = [loaded(changed(llama, "layers.0.mlp", noisy(size))) for size in (0.0, 0.05, 0.6)]
    with Scorer(llama, **FEW) as scorer:
        found = [scorer.score(one) for one in models]
        assert [scorer.score(one) for one in reversed(models)] == found[::-1]
        bare = scorer.score(models[1], texts=False)
    kls = [one.all.kl.value for one in found]
    assert kls == sorted(kls)
    assert kls[0] < 1e-6 < kls[1] < kls[2]
    assert bare.all.perplexity is None
    assert bare.all.agreement == found[1].all.agreement
    assert bare.all.kl == found[1].all.kl
    monkeypatch.setattr(scorer_module, "KEPT_BYTES", 20_000)  # so that most hidden states are computed again
    with Scorer(llama, **FEW) as scorer:
        assert scorer.score(models[2]) == found[2]


def test_a_model_whose_logits_are_not_finite_is_an_error(llama: Path, changed: Callable[..., Path]) -> None:
    """A candidate with an infinite weight is an error, not a score."""

    def change(name: str, tensor: Tensor) -> Tensor:
        damaged = tensor.clone()
        damaged[0, 0] = torch.inf
        return damaged

    broken = changed(llama, "layers.1.mlp.down_proj", change)
    with Scorer(llama, **FEW) as scorer, pytest.raises(RequestFailed, match="not finite"):
        scorer.score(loaded(broken))


def test_prompts_are_cut_to_what_the_model_takes(llama: Path, changed: Callable[..., Path]) -> None:
    """A model with a short context gets prompts that leave room for the continuation; one too short is refused."""
    short = changed(llama, "nothing", lambda name, tensor: tensor, max_position_embeddings=40)
    report = verify(short, short, keep=False, **FEW)
    assert report.passed
    assert report.scores.all.positions == FEW["prompts"] * FEW["new_tokens"]
    with pytest.raises(ConfigError, match=r"new_tokens=64: .* takes at most 40 tokens"):
        Scorer(short, prompts=5)
    with Scorer(llama, **FEW) as scorer, pytest.raises(ConfigError, match="takes 40 tokens at most"):
        scorer.score_model(ModelChoice(short), edit=False)


def test_models_of_other_vocabularies_are_refused(llama: Path, gemma: Path, changed: Callable[..., Path]) -> None:
    """Two models whose tokens differ in number, in spelling or in how they cut a text are refused before any work."""
    with pytest.raises(ConfigError, match="cannot be compared"):
        verify(llama, gemma)

    def retold(change: Callable[[dict[str, Any]], None]) -> Path:
        copy = changed(llama, "nothing", lambda name, tensor: tensor)
        tree = json.loads((copy / "tokenizer.json").read_text(encoding="utf-8"))
        change(tree["model"])
        (copy / "tokenizer.json").write_text(json.dumps(tree), encoding="utf-8")
        return copy

    def respell(model: dict[str, Any]) -> None:
        model["merges"].remove(["Ġb", "e"])
        model["vocab"]["Ġx"] = model["vocab"].pop("Ġbe")

    with pytest.raises(ConfigError, match="token 299 is b' x' in the candidate and b' be' in the baseline"):
        verify(llama, retold(respell))
    with pytest.raises(ConfigError, match=r"cut .* into other tokens"):
        verify(llama, retold(lambda model: model["merges"].clear()))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"prompts": 0}, "prompts=0"),
        ({"prompts": 1.5}, "prompts=1.5"),
        ({"new_tokens": 1}, "new_tokens=1"),
        ({"text_tokens": -1}, "text_tokens=-1"),
        ({"seed": -1}, "seed=-1"),
        ({"texts": ["/nowhere/at/all.txt"]}, "cannot be read"),
        ({"dtype": "int4"}, "dtype='int4'"),
        ({"precision": "asymetric"}, "asymetric"),
        ({"metric": "bleu"}, "metric='bleu'"),
        ({"metric": "edit", "edit": False}, "needs edit=True"),
    ],
)
def test_wrong_arguments_are_refused_before_any_work(llama: Path, wrong: dict[str, Any], told: str) -> None:
    """A wrong argument is an error that names it, and nothing is loaded for it."""
    steps: list[str] = []
    with pytest.raises(Exception, match=told) as caught:
        verify(llama, llama, keep=False, progress=lambda what, done, total: steps.append(what), **wrong)
    assert type(caught.value).__name__ in ("ConfigError", "PluginError")
    assert steps == []


def test_the_same_weights_need_another_form(llama: Path) -> None:
    """Without a candidate there has to be a dtype or a precision that differs from the baseline's."""
    with pytest.raises(ConfigError, match="no candidate"):
        verify(llama)
    report = verify(llama, dtype="bfloat16", noise=False, edit=False, **FEW)
    assert report.candidate.dtype == "bfloat16"
    assert 0.0 < report.scores.all.kl.value < 0.1
    report = verify(llama, precision="uniform-int8", noise=False, edit=False, **FEW)
    assert report.candidate.precision == "uniform-int8"
    assert 1e-6 < report.scores.all.kl.value < 0.1
    assert not (llama / "verify.json").exists()
