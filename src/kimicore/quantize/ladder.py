"""Climbing: finer precisions for the matrices that matter most, until the model says what it said before."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from attrs import evolve, frozen
from torch import Tensor

from kimicore.model.load import open_source
from kimicore.model.source import WeightSource
from kimicore.policies.precision.formats import PRECISIONS
from kimicore.policies.precision.resolving import ResolvedMap
from kimicore.quantize.calibration import calibration_texts, calibration_tokens
from kimicore.quantize.methods import QuantizeSettings
from kimicore.quantize.reading import ModelReader
from kimicore.quantize.run import Quantized, check_apart, check_target, quantize_model, take_place
from kimicore.quantize.sensitivity import Cost, measure_costs, total
from kimicore.text.tokenizer import Tokenizer
from kimicore.verify.report import REPORT_FILE, Report

__all__ = ["LEAST_SHARE", "Climbed", "Rung", "climb", "climbed_map"]

Progress = Callable[[str, int, int], None]
Judge = Callable[[Path], Report]

LEAST_SHARE: Final = 0.5
"""The share of feed-forward weights that have to stay under 16 bits for a model to count as quantizable."""
_SEQUENCES: Final = 10
_TOKENS: Final = 64
_CAREFUL: Final = 0.5  # of the loss that is aimed at after a miss
_AIM: Final = 1.5  # times the loss of bfloat16 is aimed at first: about where agreement is that of bfloat16
_STEPS: Final = 12


@frozen
class Rung:
    """A map that was tried: the share of feed-forward weights under 16 bits in it, and what its verdict went by."""

    ffn_share: float
    weight_bytes: int
    agreement: float
    kl: float
    passed: bool


@frozen
class Climbed:
    """The end of a climb: what was tried, the last map, its report, and what was written (None: nothing)."""

    rungs: tuple[Rung, ...]
    found: ResolvedMap
    report: Report
    written: Quantized | None

    @property
    def quantizable(self) -> bool:
        """Whether a map passed that keeps at least half of the feed-forward weights under 16 bits."""
        return self.rungs[-1].passed and self.rungs[-1].ffn_share >= LEAST_SHARE


def climbed_map(found: ResolvedMap, costs: Sequence[Cost], most: float) -> ResolvedMap:
    """Return a map whose losses sum up to at most ``most``, climbed from ``found`` where a byte gains most.

    Each step takes the matrix whose next precision takes away the most loss for each byte that it adds.
    """
    at = {one.module.module.name: 0 for one in costs}
    rungs = {one.module.module.name: tuple(one.losses) for one in costs}
    chosen = {name: own[0] for name, own in rungs.items()}
    while total(costs, chosen) > most:
        best, gain = "", -1.0
        for one in costs:
            name = one.module.module.name
            if at[name] + 1 < len(rungs[name]):
                now, after = rungs[name][at[name]], rungs[name][at[name] + 1]
                size = _bytes(one, after) - _bytes(one, now)
                worth = (one.losses[now] - one.losses[after]) / size
                if worth > gain:
                    best, gain = name, worth
        if not best:
            break
        at[best] += 1
        chosen[best] = rungs[best][at[best]]
    return with_precisions(found, chosen)


def with_precisions(found: ResolvedMap, chosen: Mapping[str, str]) -> ResolvedMap:
    """Return a map with other precisions for some modules, whose rule is then "ladder"."""
    modules = tuple(
        evolve(one, precision=chosen[one.module.name], rule="ladder")
        if chosen.get(one.module.name, one.precision) != one.precision
        else one
        for one in found.modules
    )
    return evolve(found, modules=modules)


def _bytes(cost: Cost, precision: str) -> int:
    return PRECISIONS[precision].weight_bytes(cost.module.module.shape)


def climb(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    found: ResolvedMap,
    judge: Judge,
    settings: QuantizeSettings | None = None,
    *,
    overwrite: bool = False,
    keep_failed: bool = False,
    progress: Progress | None = None,
    told: Callable[[Rung], None] | None = None,
) -> Climbed:
    """Quantize a model, judge it, and climb from ``found`` until it passes; then write it as ``out``.

    ``judge`` compares a folder with the model as it was. A model that does not pass, or passes only with more than half
    of its feed-forward weights at 16 bits, is not quantizable, and is written only where ``keep_failed``. ``told``
    hears of each map that was tried. The folder keeps the last report.

    Raises what :func:`~kimicore.quantize.run.quantize_model` and the judge do.
    """
    settings = settings or QuantizeSettings()
    target = check_target(Path(out).expanduser(), overwrite)
    attempt = target.with_name(f"{target.name}.attempt")
    source = open_source(model)
    check_apart(source, target)
    costs: tuple[Cost, ...] = ()
    rungs: list[Rung] = []
    most = 0.0
    while True:
        made = quantize_model(source, attempt, found, settings, overwrite=True, progress=progress)
        report = judge(attempt)
        scores = report.scores.all
        rungs.append(Rung(made.ffn_share, made.weight_bytes, scores.agreement.value, scores.kl.value, report.passed))
        if told is not None:
            told(rungs[-1])
        if report.passed or not _rounded(found) or len(rungs) > _STEPS:
            break
        if not costs:
            costs = measure_costs(ModelReader.of(source), found, _few_tokens(source), progress)
            most = total(costs, {one.module.module.name: one.module.precision for one in costs})
            floor = report.noise.all.kl.value if report.noise is not None else 0.0
            most *= min(_CAREFUL, _AIM * floor / scores.kl.value if scores.kl.value else _CAREFUL) or _CAREFUL
        else:
            most *= _CAREFUL
        before = found
        found = climbed_map(found, costs, most)
        if found == before or most < 1e-9:
            found = with_precisions(found, dict.fromkeys(_rounded(found), "bfloat16"))
    end = Climbed(tuple(rungs), found, report, None)
    return evolve(end, written=_kept(made, report, target, attempt, end.quantizable or keep_failed))


def _rounded(found: ResolvedMap) -> list[str]:
    return [one.module.name for one in found.modules if PRECISIONS[one.precision].kind == "int"]


def _few_tokens(source: WeightSource) -> Tensor:
    """Return the sequences that sensitivity is measured on, some of each kind of text."""
    return calibration_tokens(Tokenizer.from_source(source.text), calibration_texts(), _SEQUENCES, _TOKENS)


def _kept(made: Quantized, report: Report, target: Path, attempt: Path, wanted: bool) -> Quantized | None:
    """Let the last attempt take the target's place, its report in it, or take it away."""
    if not wanted:
        shutil.rmtree(attempt)
        return None
    evolve(report, candidate=evolve(report.candidate, model=str(target))).write(attempt / REPORT_FILE)
    take_place(attempt, target)
    return evolve(made, folder=target)
