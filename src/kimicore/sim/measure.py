"""How long the steps of a real engine take: what the simulator's step times are fitted to."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from attrs import frozen

from kimicore.contracts import Runner
from kimicore.cost import step_load
from kimicore.errors import ConfigError
from kimicore.sim.cost import Fit, Measurement, fit
from kimicore.types import BoundStep, StepResult

if TYPE_CHECKING:
    from kimicore.sync import SyncEngine

__all__ = ["Batch", "StepClock", "calibration", "fit_engine", "robust_fit"]

PAUSE_S = 0.05
"""Between two steps a busy engine needs far less; a longer pause was the engine's rest, and no part of a step."""
OUTLIERS = 4.0
"""Steps that are this many times as far from a first fit as half of them are do not count (the machine did something
else)."""


class StepClock:
    """A runner around another one that notes how long each step took, with what the engine does between two steps.

    A step counts from the end of the one before it, so that planning, binding, committing and telling are in it; the
    first step after a pause is left out, since nobody knows what its engine did before.
    """

    def __init__(self, runner: Runner, clock: Callable[[], float] = time.perf_counter) -> None:
        self.runner = runner
        self._clock = clock
        self._ended_s: float | None = None
        self.measurements: list[Measurement] = []

    def run(self, step: BoundStep) -> StepResult:
        """Run the step."""
        begun_s = self._clock()
        result = self.runner.run(step)
        now_s = self._clock()
        before_s, self._ended_s = self._ended_s, now_s
        if before_s is not None and begun_s - before_s <= PAUSE_S:
            tokens, rows, context, pairs = step_load(step.rows)
            samples = sum([row.sample for row in step.rows])
            run_tokens = max(tokens, step.shape.tokens)
            self.measurements.append(Measurement(run_tokens, rows, context, pairs, samples, now_s - before_s))
        return result

    def close(self) -> None:
        """Close the runner inside."""
        self.runner.close()


@frozen
class Batch:
    """Requests that are made together: the lengths of their prompts, and how many tokens each generates."""

    prompts: tuple[int, ...]
    output_tokens: int


def calibration(max_batch_size: int, context_tokens: int) -> Iterator[Batch]:
    """Yield batches whose steps differ in every way that step times know of, within an engine's limits.

    Few and many rows, short and long contexts, chunks of all sizes, chunks beside rows that generate.
    """
    longest = context_tokens - 13
    for rows in (1, 2, 4, 8, 16, 32):
        if rows <= max_batch_size:
            yield Batch((min(16, longest),) * rows, 12)
    for length in (24, 96, 384, 768):
        if length <= longest:
            yield Batch((length,), 3)
    if longest >= 320:
        yield Batch((320,) * min(6, max_batch_size), 10)
        yield Batch(tuple(range(40, 281, 40))[:max_batch_size], 8)


def fit_engine(
    engine: SyncEngine,
    *,
    repeat: int = 2,
    seed: int = 0,
    batches: Sequence[Batch] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Fit:
    """Run ``batches`` (None: :func:`calibration`) ``repeat`` times and return the times that fit the engine's steps.

    The engine has to be at nobody else's service. Prompts are random token ids. Raises what its requests raise, and
    :class:`~kimicore.ConfigError` for too few steps.
    """
    engine.open()
    loop = engine.face.loop
    config = engine.config
    chosen = list(calibration(config.max_batch_size, loop.context_tokens) if batches is None else batches)
    source = random.Random(seed)
    clock = StepClock(loop.runner)
    loop.runner = clock
    try:
        for turn in range(repeat):
            for at, batch in enumerate(chosen):
                if progress is not None:
                    progress("measuring steps", turn * len(chosen) + at, repeat * len(chosen))
                prompts = [[source.randrange(loop.vocab_tokens) for _ in range(length)] for length in batch.prompts]
                engine.generate_many(prompts, max_tokens=batch.output_tokens, temperature=0.0, ignore_eos=True)
    finally:
        loop.runner = clock.runner
    return robust_fit(clock.measurements)


def robust_fit(measurements: Sequence[Measurement]) -> Fit:
    """Return a fit that steps disturbed from outside do not move; its errors are those of the others."""
    first = fit(measurements).times
    errors = [
        abs(first.seconds(one.tokens, one.rows, one.context_tokens, one.pairs, one.samples) - one.seconds) / one.seconds
        for one in measurements
    ]
    usual = sorted(errors)[len(errors) // 2]
    kept = [one for one, error in zip(measurements, errors, strict=True) if error <= OUTLIERS * usual + 1e-9]
    if len(kept) < 8:
        raise ConfigError(f"only {len(kept)} of {len(measurements)} measured steps agree; measure on a quiet machine")
    return fit(kept)
