"""A climb's order: up until a map passes, back down between the last miss and the pass, and the smallest is written.

The judge here goes by the bytes of what was written, so that it is known which maps must pass; all else is real.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.quantize.test_folder import SMALL, resolved
from tests.quantize.test_runs import content
from tests.rigs.tiny import make_tiny

from kimicore.errors import ConfigError
from kimicore.policies.precision import PRECISIONS, ResolvedMap
from kimicore.quantize.finish import read_record
from kimicore.quantize.ladder import Climbed, Rung, climb
from kimicore.quantize.methods import QuantizeSettings
from kimicore.quantize.run import quantize_model
from kimicore.verify.report import ComparedModel, Report
from kimicore.verify.tally import Estimate, Measured, Scores


class ByteJudge:
    """Passes what ``rule`` says of the bytes of a folder's weights.

    ``noise``: the KL of bfloat16, where the candidates' is 0.5. The less it is, the further the first climb goes.
    """

    def __init__(self, rule: Callable[[int], bool], noise: float = 0.1) -> None:
        self.rule, self.noise = rule, noise
        self.seen: list[ResolvedMap] = []

    def __call__(self, folder: Path) -> Report:
        _, found = read_record(folder)
        self.seen.append(found)
        value = 1.0 if self.rule(found.weight_bytes) else 0.5
        own, plain = self._measured(value, 0.5), self._measured(0.99, self.noise)
        models = [ComparedModel(name, "11", "float32", "stored", 1) for name in ("source", str(folder))]
        return Report(models[0], models[1], own, plain, "agreement", 4, 0, "d", {}, {})

    @staticmethod
    def _measured(agreement: float, kl: float) -> Measured:
        scores = Scores(1, 4, Estimate(agreement, agreement, agreement), Estimate(kl, kl, kl))
        return Measured(scores, {"news": scores})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_tiny(tmp_path / "source", num_hidden_layers=4)


HOW = QuantizeSettings(**SMALL)


def start(source: Path, judge: Callable[[Path], Report], **given: Any) -> tuple[Climbed, list[Rung]]:
    told: list[Rung] = []
    found = resolved(source, "asymmetric", {"ffn": "int4-g32"})
    end = climb(source, source.parent / "out", found, judge, HOW, told=told.append, **given)
    return end, told


def sizes(source: Path) -> tuple[int, int]:
    """The bytes of the first map and of one whose feed-forward weights are all at 16 bits."""
    first = resolved(source, "asymmetric", {"ffn": "int4-g32"}).weight_bytes
    return first, resolved(source, "asymmetric", {"ffn": "bfloat16"}).weight_bytes


def test_the_smallest_that_passed_is_written(source: Path) -> None:
    """After a pass it goes back down, each map is told in its order, and the smallest that passed is written."""
    first, last = sizes(source)
    limit = first + (last - first) // 5
    judge = ByteJudge(lambda size: size >= limit)
    plain, _ = start(source, judge, steps_down=0)
    assert plain.kept == len(plain.rungs) - 1
    judge.seen.clear()
    end, told = start(source, judge, steps_down=4, overwrite=True)
    assert list(end.rungs) == told
    assert len(end.rungs) > len(plain.rungs)
    assert [one.passed for one in end.rungs[: len(plain.rungs)]] == [one.passed for one in plain.rungs]
    assert end.rung == min((one for one in told if one.passed), key=lambda one: one.weight_bytes)
    assert limit <= end.rung.weight_bytes < plain.rung.weight_bytes
    assert end.found == judge.seen[end.kept] == read_record(source.parent / "out")[1]
    assert end.report.passed
    assert end.quantizable
    misses = [found.weight_bytes for found in judge.seen if found.weight_bytes < limit]
    assert max(misses) < end.found.weight_bytes


def test_what_is_written_is_that_map_quantized_alone(source: Path, tmp_path: Path) -> None:
    """Byte by byte the folder is that of a run with the map that was kept, the report beside it."""
    first, last = sizes(source)
    end, told = start(source, ByteJudge(lambda size: size >= (first + last) // 2), steps_down=3)
    assert end.written is not None
    assert end.written.folder == tmp_path / "out"
    found = content(tmp_path / "out")
    assert Report.from_json(found.pop("verify.json")).candidate.model == str(tmp_path / "out")
    assert found == content(quantize_model(source, tmp_path / "alone", end.found, HOW).folder)
    assert any(one.layers_reused for one in told)
    assert not (tmp_path / "out.ladder").exists()


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_misses_on_the_way_down_change_nothing(steps: int, source: Path) -> None:
    """Where no smaller map passes, so many are tried as was asked for, each nearer to the pass, which is written."""
    tried: list[int] = []

    def second_only(size: int) -> bool:
        tried.append(size)
        return len(tried) == 2

    end, told = start(source, ByteJudge(second_only, noise=0.01), steps_down=steps)
    assert end.kept == 1
    assert [one.passed for one in told] == [False, True] + [False] * steps
    down = tried[2:]
    assert down == sorted(set(down))
    assert all(tried[0] < size < tried[1] for size in down)
    assert end.written is not None
    assert read_record(end.written.folder)[1].weight_bytes == tried[1]


def test_a_first_map_that_passes_is_the_end(source: Path) -> None:
    """Nothing is tried below the map that was asked for."""
    end, told = start(source, ByteJudge(lambda size: True), steps_down=5)
    assert len(told) == 1
    assert (end.kept, end.found) == (0, resolved(source, "asymmetric", {"ffn": "int4-g32"}))


def test_a_pass_at_16_bits_leads_back_down_to_a_quantizable_map(source: Path) -> None:
    """A first pass that keeps too little under 16 bits is not the end where a smaller map passes as well."""
    first, last = sizes(source)
    judge = ByteJudge(lambda size: size > first + (last - first) // 3, noise=1e-12)
    plain, _ = start(source, judge, steps_down=0)
    assert plain.rung.passed
    assert plain.rung.ffn_share == 0.0
    assert not plain.quantizable
    assert plain.written is None
    end, told = start(source, judge, steps_down=4)
    assert told[1] == plain.rung
    assert end.quantizable
    assert end.written is not None
    assert first < end.rung.weight_bytes < last


def test_what_never_passes_ends_at_16_bits(source: Path) -> None:
    """Where nothing passes, the last map tried rounds nothing; it is written only where that is asked for."""
    end, told = start(source, ByteJudge(lambda size: False))
    assert not end.quantizable
    assert end.written is None
    assert end.kept == len(told) - 1
    assert [one.name for one in source.parent.iterdir()] == ["source"]
    assert len(told) <= 13
    again, _ = start(source, ByteJudge(lambda size: False), keep_failed=True)
    assert again.written is not None
    assert read_record(again.written.folder)[1] == end.found
    if len(told) < 13:
        assert all(PRECISIONS[one.precision].kind == "float" for one in end.found.modules)


class Broken(Exception):
    """What a judge may fail with."""


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_judge_that_fails_leaves_nothing(at: int, source: Path) -> None:
    """Whichever map it is that cannot be judged, the error is passed on, and what was there before is untouched."""
    found = resolved(source, "asymmetric", {"ffn": "int8"})
    before = content(quantize_model(source, source.parent / "out", found, QuantizeSettings(method="nearest")).folder)
    first, last = sizes(source)
    judge = ByteJudge(lambda size: size > first + (last - first) // 3)

    def failing(folder: Path) -> Report:
        if len(judge.seen) == at:
            raise Broken
        return judge(folder)

    with pytest.raises(Broken):
        start(source, failing, overwrite=True)
    assert content(source.parent / "out") == before
    assert sorted(one.name for one in source.parent.iterdir()) == ["out", "source"]


def test_an_interrupted_first_map_is_gone_on_with(source: Path) -> None:
    """What is quantized of the first map when a climb is interrupted is not computed again by the next one."""
    first, _ = sizes(source)
    judge = ByteJudge(lambda size: size > first)

    def interrupt(what: str, done: int, total: int) -> None:
        if (what, done) == ("layers", 3):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(source, judge, progress=interrupt)
    assert [one.name for one in (source.parent / "out.ladder").iterdir()] == ["attempt.partial"]
    end, told = start(source, judge)
    assert told[0].layers_reused == 3
    assert end.quantizable
    assert sorted(one.name for one in source.parent.iterdir()) == ["out", "source"]


def test_what_cannot_be_is_told_before_the_work(source: Path) -> None:
    """A number of steps that makes no sense, and a folder of that name with something else in it, are errors."""
    judge = ByteJudge(lambda size: True)
    for steps in (-1, 17, 1.5, True):
        with pytest.raises(ConfigError, match=f"steps_down={steps}"):
            start(source, judge, steps_down=steps)
    other = source.parent / "out.ladder"
    other.mkdir()
    (other / "letter.txt").write_text("dear")
    with pytest.raises(ConfigError, match=r"out\.ladder: holds what no ladder left; move it away, or name another"):
        start(source, judge)
    assert (other / "letter.txt").read_text() == "dear"
    assert judge.seen == []
