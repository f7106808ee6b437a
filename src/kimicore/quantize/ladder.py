"""Climbing: finer precisions for the matrices that matter most, until the model says what it said before."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

from attrs import define, evolve, field, frozen
from torch import Tensor

from kimicore.checks import integer
from kimicore.errors import ConfigError
from kimicore.model.load import open_source
from kimicore.model.source import WeightSource
from kimicore.policies.precision.formats import PRECISIONS
from kimicore.policies.precision.resolving import ResolvedMap
from kimicore.quantize.calibration import calibration_texts, calibration_tokens
from kimicore.quantize.files import disk_errors
from kimicore.quantize.methods import QuantizeSettings
from kimicore.quantize.path import ClimbPath
from kimicore.quantize.reading import ModelReader
from kimicore.quantize.reuse import EarlierLayers
from kimicore.quantize.run import Quantized, check_apart, check_target, quantize_model, take_place
from kimicore.quantize.sensitivity import measure_costs
from kimicore.text.tokenizer import Tokenizer
from kimicore.verify.report import REPORT_FILE, Report

__all__ = ["LEAST_SHARE", "STEPS_DOWN", "Climbed", "Rung", "check_climb", "climb"]

Progress = Callable[[str, int, int], None]
Judge = Callable[[Path], Report]

LEAST_SHARE: Final = 0.5
"""The share of feed-forward weights that have to stay under 16 bits for a model to count as quantizable."""
STEPS_DOWN: Final = 2
"""Maps that are tried after the first that passes, each with fewer bytes than the smallest that did."""
_SEQUENCES: Final = 10
_TOKENS: Final = 64
_CAREFUL: Final = 0.5  # of a map's loss that is aimed at after it missed
_AIM: Final = 1.5  # times the loss of bfloat16 is aimed at first: about where agreement is that of bfloat16
_STEPS: Final = 12
_OWN: Final = frozenset({"attempt", "attempt.old", "attempt.partial", "best", "best.old", "layers"})


@frozen
class Rung:
    """A map that was tried: the share of feed-forward weights under 16 bits in it, and what its verdict went by.

    ``layers_reused``: how many of its layers were taken from the map before, in which they are the same.
    """

    ffn_share: float
    weight_bytes: int
    agreement: float
    kl: float
    passed: bool
    layers_reused: int = 0


@frozen
class Climbed:
    """The end of a climb: all that was tried, in that order, and the map that was settled on.

    ``kept``: which of ``rungs`` that is: the smallest that passed, or the last one where none did. ``found`` is its
    map, ``report`` its report, and ``written`` what was written of it (None: nothing).
    """

    rungs: tuple[Rung, ...]
    kept: int
    found: ResolvedMap
    report: Report
    written: Quantized | None

    @property
    def rung(self) -> Rung:
        """The rung that was settled on."""
        return self.rungs[self.kept]

    @property
    def quantizable(self) -> bool:
        """Whether a map passed that keeps at least half of the feed-forward weights under 16 bits."""
        return self.rung.passed and self.rung.ffn_share >= LEAST_SHARE


def climb(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    found: ResolvedMap,
    judge: Judge,
    settings: QuantizeSettings | None = None,
    *,
    steps_down: int = STEPS_DOWN,
    overwrite: bool = False,
    keep_failed: bool = False,
    progress: Progress | None = None,
    told: Callable[[Rung], None] | None = None,
) -> Climbed:
    """Quantize a model, judge it, climb from ``found`` until it passes, step back down, and write the best as ``out``.

    ``judge`` compares a folder with the model as it was. After the first pass ``steps_down`` more maps are tried, each
    halfway between the last that missed and the smallest that passed; the smallest that passed is the best. A model
    that does not pass, or passes only with more than half of its feed-forward weights at 16 bits, is not quantizable,
    and is written only where ``keep_failed``. ``told`` hears of each map that was tried. The folder keeps its report.

    The work lies in ``out`` with ".ladder" behind its name, and is deleted at the end.

    Raises what :func:`~kimicore.quantize.run.quantize_model` and the judge do, and :class:`~kimicore.ConfigError` for
    ``steps_down`` not from 0 to 16 and a ".ladder" folder that holds anything else, before any work.
    """
    source, target = check_climb(model, out, steps_down, overwrite)
    work = _Climb.begin(source, target, judge, settings or QuantizeSettings(), progress, told)
    try:
        kept = work.search(found, steps_down)
        end = Climbed(tuple(work.rungs), kept.number, kept.found, kept.report, None)
        if end.quantizable or keep_failed:
            end = evolve(end, written=work.write(kept))
        work.clear("attempt.partial")
        return end
    finally:
        work.clear(*(_OWN - {"attempt.partial"}))


def check_climb(
    model: str | os.PathLike[str], out: str | os.PathLike[str], steps_down: int, overwrite: bool
) -> tuple[WeightSource, Path]:
    """Return the model's source and the folder to write, before a judge is made, which takes long.

    Raises :class:`~kimicore.ConfigError` as :func:`climb` does, and :class:`~kimicore.ModelLoadError`.
    """
    integer("steps_down", steps_down, 0, 16, ConfigError)
    target = check_target(Path(out).expanduser(), overwrite)
    source = open_source(model)
    check_apart(source, target)
    return source, target


@frozen
class _Tried:
    """A map that was tried, as which, what was made of it, and what the judge said."""

    number: int
    found: ResolvedMap
    made: Quantized
    report: Report


@define(eq=False)
class _Climb:
    """A climb at work in a folder of its own: "attempt" is what is tried, "best" the smallest that passed."""

    source: WeightSource
    target: Path
    folder: Path
    judge: Judge
    settings: QuantizeSettings
    progress: Progress | None
    told: Callable[[Rung], None] | None
    earlier: EarlierLayers
    rungs: list[Rung] = field(factory=list)

    @classmethod
    def begin(
        cls,
        source: WeightSource,
        target: Path,
        judge: Judge,
        settings: QuantizeSettings,
        progress: Progress | None,
        told: Callable[[Rung], None] | None,
    ) -> Self:
        """Return the climb, its folder there; an attempt that was interrupted in it stays, to be gone on with."""
        folder = target.with_name(f"{target.name}.ladder")
        if folder.exists() and not (folder.is_dir() and {one.name for one in folder.iterdir()} <= _OWN):
            raise ConfigError(f"{folder}: holds what no ladder left; move it away, or name another --out")
        with disk_errors(folder):
            folder.mkdir(exist_ok=True)
        work = cls(source, target, folder, judge, settings, progress, told, EarlierLayers(folder / "layers"))
        for name in _OWN - {"attempt.partial"}:
            shutil.rmtree(folder / name, ignore_errors=True)
        return work

    def clear(self, *names: str) -> None:
        """Delete what lies in the folder under these names, and the folder once it is empty."""
        for name in names:
            shutil.rmtree(self.folder / name, ignore_errors=True)
        if self.folder.exists() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def attempt(self, found: ResolvedMap) -> _Tried:
        """Quantize by a map and have it judged; what passes becomes the best."""
        place = self.folder / "attempt"
        made = quantize_model(
            self.source, place, found, self.settings, overwrite=True, progress=self.progress, earlier=self.earlier
        )
        report = self.judge(place)
        scores = report.scores.all
        rung = Rung(
            made.ffn_share,
            made.weight_bytes,
            scores.agreement.value,
            scores.kl.value,
            report.passed,
            made.layers_reused,
        )
        self.rungs.append(rung)
        if rung.passed:
            take_place(place, self.folder / "best")
        if self.told is not None:
            self.told(rung)
        return _Tried(len(self.rungs) - 1, found, made, report)

    def search(self, found: ResolvedMap, steps_down: int) -> _Tried:
        """Climb until a map passes, then go back down; return the smallest that passed, or the last one tried."""
        tried = self.attempt(found)
        if tried.report.passed or not _rounds(found):
            return tried
        path = ClimbPath.of(
            found, measure_costs(ModelReader.of(self.source), found, _few_tokens(self.source), self.progress)
        )
        missed, share = 0, _first_share(tried.report)
        while True:
            at = path.position(path.losses[missed] * share, missed)
            tried = self.attempt(path.map_at(at))
            if tried.report.passed:
                return self.step_down(path, missed, at, tried, steps_down)
            if at == path.last or len(self.rungs) > _STEPS:
                return tried
            missed, share = at, _CAREFUL

    def step_down(self, path: ClimbPath, missed: int, passed: int, best: _Tried, steps: int) -> _Tried:
        """Return the smallest map that passes, of some between a position that missed and one that passed."""
        for _ in range(steps):
            at = path.between(missed, passed)
            if at is None:
                break
            tried = self.attempt(path.map_at(at))
            if tried.report.passed:
                passed, best = at, tried
            else:
                missed = at
        return best

    def write(self, kept: _Tried) -> Quantized:
        """Let what was settled on take the target's place, its report in it."""
        place = self.folder / ("best" if kept.report.passed else "attempt")
        report = evolve(kept.report, candidate=evolve(kept.report.candidate, model=str(self.target)))
        report.write(place / REPORT_FILE)
        take_place(place, self.target)
        return evolve(kept.made, folder=self.target)


def _rounds(found: ResolvedMap) -> bool:
    return any(PRECISIONS[one.precision].kind == "int" for one in found.modules)


def _first_share(report: Report) -> float:
    """Return the share of the first map's loss that is aimed at, from how far it is from what bfloat16 loses."""
    floor, kl = report.noise.all.kl.value if report.noise is not None else 0.0, report.scores.all.kl.value
    return min(_CAREFUL, _AIM * floor / kl if kl else _CAREFUL) or _CAREFUL


def _few_tokens(source: WeightSource) -> Tensor:
    """Return the sequences that sensitivity is measured on, some of each kind of text."""
    return calibration_tokens(Tokenizer.from_source(source.text), calibration_texts(), _SEQUENCES, _TOKENS)
