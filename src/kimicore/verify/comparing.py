"""The whole comparison: baseline, candidate, noise floor, report."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kimicore.errors import ConfigError
from kimicore.verify.opened import ModelChoice, check_same_vocabulary, vocabulary_of
from kimicore.verify.prompts import built_in
from kimicore.verify.report import REPORT_FILE, Metric, Report, library_versions, machine
from kimicore.verify.scorer import Scorer

__all__ = ["verify"]


def verify(
    baseline: str | os.PathLike[str],
    candidate: str | os.PathLike[str] | None = None,
    *,
    prompts: int = 200,
    new_tokens: int = 64,
    dtype: str = "float32",
    precision: str = "stored",
    policy: Mapping[str, Any] | None = None,
    skip_layers: Sequence[int] = (),
    activations: str = "map",
    metric: Metric = "agreement",
    texts: Sequence[str] = (),
    text_tokens: int = 2048,
    edit: bool = True,
    noise: bool = True,
    keep: bool = True,
    threads: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    seed: int = 0,
) -> Report:
    """Compare ``candidate`` with ``baseline`` in float32 and return the report.

    The baseline continues each of ``prompts`` prompts greedily by ``new_tokens`` tokens. Both models are led through
    these continuations: at each position their likeliest tokens and distributions are compared. ``edit``: the candidate
    continues the prompts by itself as well. ``noise``: the baseline in bfloat16 is measured in the same way.

    ``candidate``: a model, None for the baseline's own weights; ``dtype``, ``precision``, ``policy``, ``skip_layers``
    and ``activations`` say how it is loaded, as in :class:`~kimicore.EngineConfig` (``policy``: the precision policy's
    settings). ``texts``: files of own texts; see :class:`~kimicore.verify.Scorer` for them and for the other arguments.
    ``keep``: write the report as ``verify.json`` beside the weights of a candidate folder that is loaded as it lies.

    It passes at an agreement of at least 98.5 %, or of at least that of bfloat16 less 0.5 points; under
    ``metric="edit"`` at an edit similarity of at least 98.5 %.

    Raises :class:`~kimicore.ConfigError` for wrong arguments and for models of different vocabularies,
    :class:`~kimicore.ModelLoadError`, and :class:`~kimicore.RequestFailed` where a model's logits are not finite.
    """
    choice = ModelChoice(candidate or baseline, dtype, precision, policy or {}, skip_layers, activations)
    _check(metric, edit)
    _check_pair(ModelChoice(baseline), choice, same=candidate is None, progress=progress)
    with Scorer(
        baseline,
        prompts=prompts,
        new_tokens=new_tokens,
        texts=texts,
        text_tokens=text_tokens,
        threads=threads,
        progress=progress,
        seed=seed,
    ) as scorer:
        scores, compared = scorer.score_model(choice, edit=edit)
        floor = scorer.noise(edit=edit) if noise else None
        digest, who = scorer.corpus.digest, scorer.baseline_record()
    told = library_versions(), machine()
    report = Report(who, compared, scores, floor, metric, new_tokens, seed, digest, *told)
    folder = Path(choice.model).expanduser()
    if keep and candidate is not None and choice.as_stored and folder.is_dir():
        report.write(folder / REPORT_FILE)
    return report


def _check(metric: str, edit: bool) -> None:
    """Refuse a metric that there is not, and one that is not measured."""
    if metric not in ("agreement", "edit"):
        raise ConfigError(f"metric={metric!r}: must be 'agreement' or 'edit'")
    if metric == "edit" and not edit:
        raise ConfigError("metric='edit' needs edit=True")


def _check_pair(
    baseline: ModelChoice, choice: ModelChoice, *, same: bool, progress: Callable[[str, int, int], None] | None
) -> None:
    """Refuse what cannot be compared before anything is computed; ``same``: both are of the same files."""
    choice.check()
    if not same:
        check_same_vocabulary(vocabulary_of(baseline), vocabulary_of(choice), built_in(1).texts.values())
    elif choice.as_stored and choice.dtype == baseline.dtype:
        raise ConfigError(
            f"no candidate: name a model, or a dtype, a precision or layers to skip that {baseline.model} is to be "
            "loaded with"
        )
    elif choice.skip_layers:
        choice.source(progress)
