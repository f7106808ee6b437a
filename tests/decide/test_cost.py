"""The model of how long a step takes."""

from __future__ import annotations

import random

import pytest

from kimicore.cost import StepTimeModel, step_load
from kimicore.sampling_params import SamplingParams
from kimicore.types import BoundRow, RowPlan


def test_the_model_learns_what_steps_cost():
    """From noisy steps with outliers the model predicts others, and 95 % of the real ones stay under 1.1 times that."""
    for scale in (0.1, 1.0, 30.0):
        random.seed(1)
        model, over, ratios = StepTimeModel(), 0, []
        for at in range(500):
            rows = random.randint(1, 32)
            context = rows * random.randint(10, 800)
            tokens, attended = rows, 0
            if random.random() < 0.4:
                chunk, start = random.randint(16, 480), random.randint(0, 4000)
                tokens, context, attended = rows + chunk, context + start + chunk, chunk * start + chunk * chunk // 2
            mean_s = scale * (0.008 + 4e-4 * tokens + 2e-4 * rows + 2e-7 * context + 2e-9 * attended)
            real_s = mean_s * random.uniform(0.9, 1.1) * (20 if at < 2 or random.random() < 0.01 else 1)
            if at > 200:
                over += real_s > 1.1 * model.step_s(tokens, rows, context, attended)
                ratios.append(model.mean_s(tokens, rows, context, attended) / mean_s)
            model.observe(real_s, tokens, rows, context, attended)
        assert over / len(ratios) <= 0.05
        ratios.sort()
        assert ratios[len(ratios) // 20] > 0.9
        assert ratios[-len(ratios) // 20] < 1.25


def test_the_model_is_sane_before_it_learned():
    """Before any step, and after odd ones, predictions are positive and grow with the work."""
    model = StepTimeModel()
    for _ in range(3):
        assert 0 < model.step_s(1, 1, 10) < model.step_s(500, 1, 500)
        for _ in range(50):
            model.observe(0.02, 8, 8, 4000)
        model.observe(0.0, 1, 1, 1)


def test_the_model_does_not_forget_chunks():
    """After thousands of steps without a chunk it still knows what one costs."""
    model = StepTimeModel()
    for at in range(200):
        tokens = 64 + at % 7 * 64
        model.observe(0.01 + 1e-3 * tokens, tokens, 1, tokens, tokens * tokens // 2)
    for _ in range(5000):
        model.observe(0.018, 8, 8, 2000)
    assert model.mean_s(264, 9, 2256, 32_768) == pytest.approx(0.27, rel=0.3)


def test_a_long_prompt_hides_nothing_about_the_streams():
    """Beside a prompt that is read in small chunks, contexts and attended pairs grow together; still the model knows
    what the streams take without it: a context token costs about what a few pairs do.
    """
    model = StepTimeModel()
    source = random.Random(4)

    def real_s(tokens: int, rows: int, context: int, attended: int) -> float:
        return (0.025 + 1.5e-3 * tokens + 3.5e-6 * context + 0.9e-6 * attended) * source.uniform(0.97, 1.03)

    for turn in range(60):
        load = (8, 8, 500 + 8 * turn, 0)
        model.observe(real_s(*load), *load)
    for turn in range(400):
        start = 8 * turn
        load = (16, 9, 980 + 8 * turn + start + 8, 8 * start + 32)
        model.observe(real_s(*load), *load)
    alone_s = model.mean_s(8, 8, 4180, 0)
    assert alone_s == pytest.approx(0.025 + 8 * 1.5e-3 + 3.5e-6 * 4180, rel=0.05)


def test_a_first_notion_scales_the_assumptions() -> None:
    """A step that was run before any request makes the assumed times this machine's, and measured ones replace them."""
    known = [0] * 64
    row = BoundRow(RowPlan(0, 0, 64), known, 64, ([0] * 4,), True, SamplingParams(), 0, 0, (), 64)
    load = step_load([row])
    slow_s = 7.0 * StepTimeModel().mean_s(*load)
    model = StepTimeModel([(slow_s, row)])
    assert model.mean_s(*load) == pytest.approx(slow_s)
    for _ in range(60):
        model.observe(0.01, *load)
    assert model.mean_s(*load) == pytest.approx(0.01, rel=0.05)
