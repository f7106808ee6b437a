"""Step times: fitted from measurements, written and read, measured around a runner."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from attrs import asdict

from kimicore.errors import ConfigError
from kimicore.sampling_params import SamplingParams
from kimicore.sim.cost import Measurement, StepTimes, fit
from kimicore.sim.measure import PAUSE_S, StepClock, calibration, robust_fit
from kimicore.types import BoundRow, BoundStep, RowPlan, RowResult, Shape, StepResult

PLANTED = StepTimes(
    base_s=4e-3, per_row_s=1e-4, per_token_s=3e-4, per_sample_s=5e-5, per_context_s=2e-7, per_pair_s=4e-9
)


def measured(times: StepTimes, count: int, noise: float = 0.0, seed: int = 0) -> list[Measurement]:
    """Return steps of all kinds that take what ``times`` say, give or take."""
    source = random.Random(seed)
    found = []
    for _ in range(count):
        rows = source.choice([1, 2, 4, 8, 16, 32])
        chunk = source.choice([0, 0, 16, 64, 256])
        context = rows * source.randrange(20, 2000) + chunk
        pairs = chunk * source.randrange(0, 1000) + chunk * chunk // 2
        samples = rows if chunk < 64 else rows - 1
        seconds = times.seconds(rows + chunk, rows, context, pairs, samples) * (1.0 + noise * source.uniform(-1, 1))
        found.append(Measurement(rows + chunk, rows, context, pairs, samples, seconds))
    return found


def test_a_fit_finds_what_was_planted() -> None:
    """Exact steps give exactly the times that made them."""
    found = fit(measured(PLANTED, 60))
    assert asdict(found.times) == pytest.approx(asdict(PLANTED), rel=1e-6, abs=1e-12)
    assert found.largest_error < 1e-9
    assert found.measurements == 60


def test_a_fit_is_never_negative() -> None:
    """A part that would come out under 0 is 0, and the errors tell how far off the steps are."""
    flat = [Measurement(t, r, 10 * t, 0, r, 0.01 / (1 + t)) for t in (8, 16, 32, 64) for r in (1, 2, 4)]
    found = fit(flat)
    assert min(asdict(found.times).values()) >= 0.0
    assert found.mean_error > 0.1


def test_disturbed_steps_do_not_move_a_fit() -> None:
    """A few steps that took ten times as long are left out."""
    steps = measured(PLANTED, 80, noise=0.05)
    wrong = [Measurement(*[*asdict(one).values()][:5], seconds=10 * one.seconds) for one in steps[::16]]
    found = robust_fit([*steps, *wrong])
    assert found.measurements <= len(steps)
    for one in steps:
        given = found.times.seconds(one.tokens, one.rows, one.context_tokens, one.pairs, one.samples)
        assert given == pytest.approx(one.seconds, rel=0.12)


@pytest.mark.parametrize("steps", [[], measured(PLANTED, 7), [Measurement(1, 1, 1, 0, 1, 0.0)] * 9])
def test_too_little_to_fit_is_refused(steps: list[Measurement]) -> None:
    """Few steps, or steps of no time, are a typed error."""
    with pytest.raises(ConfigError, match=r"measure"):
        fit(steps)


def test_times_are_written_and_read(tmp_path: Path) -> None:
    """A file keeps them to the last bit, and what stands beside them is ignored."""
    path = tmp_path / "times.json"
    PLANTED.write(path, model="some model")
    assert StepTimes.read(path) == PLANTED
    assert json.loads(path.read_text())["model"] == "some model"


@pytest.mark.parametrize(
    "text",
    [
        '{"times":' + "[" * 100_000,
        "",
        "[]",
        "{}",
        '{"times": {"base": 1}}',
        '{"times": {"base_s": -1}}',
        '{"times": {"base_s": "x"}}',
    ],
)
def test_a_file_without_times_is_refused(text: str, tmp_path: Path) -> None:
    """The error names the file."""
    path = tmp_path / "times.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"times\.json"):
        StepTimes.read(path)


def test_a_step_must_take_time() -> None:
    """Times under which the clock would stand still are refused."""
    with pytest.raises(ConfigError, match="base_s"):
        StepTimes(base_s=0.0, per_row_s=0.0, per_token_s=0.0)


class Ticking:
    """A runner whose steps take a fixed time of the clock that it moves."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.closed = False

    def __call__(self) -> float:
        return self.now_s

    def run(self, step: BoundStep) -> StepResult:
        self.now_s += 0.010
        return StepResult(tuple(RowResult() for _ in step.rows))

    def close(self) -> None:
        self.closed = True


def step_of(start: int, count: int, known: int, shape_tokens: int) -> BoundStep:
    """Return a step of one row."""
    plan = RowPlan(1, start, count)
    params = SamplingParams()
    row = BoundRow(plan, [0] * known, known, ([1],), start + count == known, params, 0, 0, (), known)
    return BoundStep(0, (row,), Shape(shape_tokens, 1, 1))


def test_a_step_counts_with_what_lies_between() -> None:
    """Planning and telling belong to the step after them; the first step after a pause is not measured."""
    runner: Any = Ticking()
    clock = StepClock(runner, runner)
    clock.run(step_of(0, 8, 20, 8))
    runner.now_s += 0.002
    clock.run(step_of(8, 12, 20, 16))
    runner.now_s += 2 * PAUSE_S
    clock.run(step_of(20, 1, 21, 1))
    runner.now_s += 0.001
    clock.run(step_of(21, 1, 22, 1))
    assert clock.measurements == [
        Measurement(16, 1, 20, 12 * 8 + 72, 1, pytest.approx(0.012)),
        Measurement(1, 1, 22, 0, 1, pytest.approx(0.011)),
    ]
    clock.close()
    assert runner.closed


@pytest.mark.parametrize(("rows", "context"), [(64, 8192), (1, 64), (4, 400)])
def test_the_calibration_keeps_to_the_engines_limits(rows: int, context: int) -> None:
    """No batch is wider than the engine or longer than its context."""
    batches = list(calibration(rows, context))
    assert batches
    assert all(len(one.prompts) <= rows and max(one.prompts) + one.output_tokens < context for one in batches)
