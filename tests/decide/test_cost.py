"""The model of how long a step takes."""

from __future__ import annotations

import random

import pytest

from kimicore.cost import StepTimeModel


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
