"""How long a step takes in the simulator: a linear model, given by hand or fitted to measurements."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from attrs import asdict, fields, frozen

from kimicore.checks import float_field
from kimicore.errors import ConfigError

__all__ = ["Fit", "Measurement", "StepTimes", "fit"]


@frozen
class StepTimes:
    """Seconds of a step: the sum of what each of its parts costs.

    ``base_s``: any step, with what the engine does around it. ``per_row_s``: a row. ``per_token_s``: a token through
    the layers, dummy tokens of the padding too. ``per_sample_s``: a row whose next token is drawn (the vocabulary's
    product). ``per_context_s``: a token of a row's context (read once a step). ``per_pair_s``: a pair of query and
    key in rows of several tokens. ``tail``: 95 of 100 real steps take less than this many times that; steps of the
    simulation take exactly that, but the planner, as in the engine, sizes chunks for the 95.

    The defaults are an upper bound of speed by the roofline for a model of 8 billion parameters in 16 bits with 8
    key-value heads of 128 in 32 layers, on one processor with 3.35 TB/s and 500 TFLOP/s: weights are read in 5 ms
    (with 2 ms for everything around), a token takes 16 GFLOP, a context's token is 128 KiB, a pair 0.5 MFLOP. Use
    ``kimicore bench --fit`` for your own model and machine. Raises :class:`~kimicore.ConfigError`.
    """

    base_s: float = float_field(7e-3, 0.0, 3600.0, fault=ConfigError)
    per_row_s: float = float_field(2e-5, 0.0, 3600.0, fault=ConfigError)
    per_token_s: float = float_field(3.2e-5, 0.0, 3600.0, fault=ConfigError)
    per_sample_s: float = float_field(2e-6, 0.0, 3600.0, fault=ConfigError)
    per_context_s: float = float_field(4e-8, 0.0, 3600.0, fault=ConfigError)
    per_pair_s: float = float_field(1e-9, 0.0, 3600.0, fault=ConfigError)
    tail: float = float_field(1.0, 1.0, 100.0, fault=ConfigError)

    def __attrs_post_init__(self) -> None:
        if self.base_s + self.per_row_s + self.per_token_s <= 0.0:
            raise ConfigError("a step must take time: base_s, per_row_s and per_token_s are all 0")

    def seconds(self, tokens: int, rows: int, context_tokens: int, pairs: int, samples: int) -> float:
        """Return the seconds of a step."""
        # Context and pairs come last, so that the rest can be added up before them with the same rounding.
        return (
            self.base_s
            + self.per_token_s * tokens
            + self.per_row_s * rows
            + self.per_sample_s * samples
            + self.per_context_s * context_tokens
            + self.per_pair_s * pairs
        )

    def step_s(self, tokens: int, rows: int, context_tokens: int, attended_tokens: int = 0) -> float:
        """Return the seconds that 95 of 100 steps stay under in which every row draws a token: what planner and
        policies ask.
        """
        return self.tail * self.seconds(tokens, rows, context_tokens, attended_tokens, rows)

    def write(self, path: str | os.PathLike[str], **more: Any) -> None:
        """Write the times as JSON, with ``more`` beside them for a reader; raises ConfigError."""
        try:
            Path(path).write_text(json.dumps({"times": asdict(self), **more}, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"the step times cannot be written to {path}: {error}") from error

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Return the times of a file that :meth:`write` made; raises :class:`~kimicore.ConfigError`."""
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))["times"]
            return cls(**found)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            names = ", ".join(one.name for one in fields(cls))
            raise ConfigError(f"{path} holds no step times ({error!r}): an object 'times' of {names}") from error


_PARTS = [one.name for one in fields(StepTimes) if one.name.endswith("_s")]


@frozen
class Measurement:
    """A step that was measured: its load (see :class:`StepTimes`) and its seconds."""

    tokens: int
    rows: int
    context_tokens: int
    pairs: int
    samples: int
    seconds: float


@frozen
class Fit:
    """Fitted times, and how far they are from the measurements, relative to these: mean and largest absolute error."""

    times: StepTimes
    mean_error: float
    largest_error: float
    measurements: int


def fit(measurements: Sequence[Measurement]) -> Fit:
    """Return the times that fit best: least squares of the relative errors, no part negative.

    Raises :class:`~kimicore.ConfigError` for fewer than 8 measurements, or one that took no time.
    """
    import numpy as np

    if len(measurements) < 8:
        raise ConfigError(f"{len(measurements)} measurements: at least 8 are needed for a fit of 6 figures")
    if min(one.seconds for one in measurements) <= 0.0:
        raise ConfigError("a measured step took no time; measure with a finer clock")
    loads = np.array([[1.0, one.rows, one.tokens, one.samples, one.context_tokens, one.pairs] for one in measurements])
    seconds = np.array([one.seconds for one in measurements])
    scale = np.maximum(np.abs(loads).max(axis=0), 1.0)
    found = _non_negative(loads / scale / seconds[:, None], np.ones(len(seconds))) / scale
    errors = np.abs(loads @ found - seconds) / seconds
    tail = max(1.0, float(np.quantile(seconds / (loads @ found), 0.95)))
    times = StepTimes(**dict(zip(_PARTS, found.tolist(), strict=True)), tail=tail)
    return Fit(times, float(errors.mean()), float(errors.max()), len(measurements))


def _non_negative(matrix: Any, right: Any) -> Any:
    """Return the x >= 0 of least ``|matrix @ x - right|`` (Lawson and Hanson's active sets, 1974)."""
    import numpy as np

    size = matrix.shape[1]
    answer = np.zeros(size)
    free = np.zeros(size, bool)
    for _ in range(8 * size):
        gradient = matrix.T @ (right - matrix @ answer)
        gradient[free] = -np.inf
        if free.all() or gradient.max() <= 1e-10:
            break
        free[int(gradient.argmax())] = True
        while True:
            trial = np.zeros(size)
            trial[free] = np.linalg.lstsq(matrix[:, free], right, rcond=None)[0]
            if not (trial[free] <= 0.0).any():
                break
            falling = free & (trial <= 0.0)
            step = (answer[falling] / (answer[falling] - trial[falling])).min()
            answer = answer + step * (trial - answer)
            free &= answer > 1e-14
            answer[~free] = 0.0
        answer = trial
    return answer
