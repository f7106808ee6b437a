"""At which rate blocks are used again, learned from the traffic: what the activity of a block is made of."""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import pairwise

__all__ = ["CLASSES", "ReuseRates", "class_of", "mean_use_s"]

# Classes: by how often a block was used, and by how many new blocks the request brought that used it last.
_USES = (1, 2, 3, 4, 6, 9, 16, 64)  # from so many uses on
_NEW_BLOCKS = (2, 3, 5, 9, 17, 33, 65, 129)  # a class ends before so many
_SIZES = len(_NEW_BLOCKS) + 1
_LAST = len(_USES)  # the group of blocks that end a sequence and were used once: often they are not even full
_GROUPS = _LAST + 1
CLASSES = _GROUPS * _SIZES
_SHARED = 6  # the groups from here up to _LAST are shared by many, and say nothing about the traffic's pace

# What is assumed before anything is seen: uses per second of a block whose uses are just now, by uses, and by what they
# are multiplied with new blocks. From the first half of the conversation trace of Mooncake (FAST 2025), smoothed; only
# their proportions matter for long. A second use by a request that brings much is rather a shared start than a turn.
_ASSUMED = (0.0015, 0.0030, 0.0045, 0.0079, 0.0147, 0.0264, 0.0576, 0.25, 0.00012)
_ASSUMED_BY_SIZE = (
    (2.0, 2.0, 1.75, 1.2, 1.05, 0.85, 0.8, 0.75, 0.6),
    (1.1, 1.3, 1.2, 0.7, 0.45, 0.45, 0.4, 0.35, 0.35),
    (1.0, 1.0, 1.0, 1.0, 0.6, 0.7, 0.7, 0.8, 0.8),
    *((1.0,) * _SIZES,) * (_GROUPS - 3),
)

# Ages: seconds since the mean use, two classes for each doubling.
_EDGES_S = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096)
_AGES = len(_EDGES_S) + 1
_WIDTHS_S = tuple(high - low for low, high in pairwise((0, *_EDGES_S, 8192)))
_MIDDLES_S = tuple((low + high) / 2 for low, high in pairwise((0, *_EDGES_S, 8192)))

# How many uses an assumption weighs: on a group of classes, on an age, on one class.
_GROUP_WEIGHT, _AGE_WEIGHT, _CLASS_WEIGHT = 16.0, 64.0, 48.0
_TICK_S = 1.0
_REQUESTS = 16  # so many requests after one group of classes was worked out the next one's turn comes


def class_of(uses: int, new_blocks: int, last: bool) -> int:
    """Return the class of a block: used ``uses`` times, at last by a request with ``new_blocks`` blocks used once.

    ``last``: it ends its sequence, which goes over other blocks before it.
    """
    group = _LAST if last and uses == 1 else bisect_right(_USES, uses) - 1
    return group * _SIZES + bisect_right(_NEW_BLOCKS, new_blocks)


def mean_use_s(uses: int, activity: float, used_s: float, half_life_s: float) -> float:
    """Return the mean time of a block's uses, in which one use counts half of one that is ``half_life_s`` later.

    ``activity``: the uses up to the last one at ``used_s``, each halved for every half-life before it. Any use that is
    later makes the mean later. It is divided by no more uses than begin the last group, and never past the last use.
    """
    return used_s + half_life_s * min(math.log2(activity / min(uses, _USES[-1])), 0.0)


class ReuseRates:
    """Estimates for each class and age how many uses a second a block gets, falling with age.

    A block's age is told from the mean time of its uses (:func:`mean_use_s`), so that few fast turns weigh like more
    slow ones; ``half_life_s`` is the one of that mean, and the one with which an assumed rate falls.
    It counts uses, and for how many seconds blocks of each class and age waited for one. The ratio is drawn towards
    that of the class's group, of its size over all groups, and of all, and these towards what is assumed, by the weight
    of a few uses. Blocks that are not used again weigh in while they wait, so the counts need not know how it ends.

    From the rates at each age follows what keeping a block is worth: of all spans from now on the best ratio of uses to
    seconds kept. It is made to fall with age by pooling neighbours (isotonic regression), because within a class the
    one with the oldest mean use goes first: seconds in which few come back count against those who wait for later ones.
    """

    def __init__(self, half_life_s: float, learn_half_life_s: float) -> None:
        self._learn_half_life_s = learn_half_life_s
        self._fading = tuple(2.0 ** (-middle / half_life_s) for middle in _MIDDLES_S)
        self._uses = [[0.0] * _AGES for _ in range(CLASSES)]
        self._waited_s = [[0.0] * _AGES for _ in range(CLASSES)]
        self._uses_total = [0.0] * CLASSES
        self._expected = [0.0] * CLASSES  # uses that were to come by what is assumed
        self._base = [_ASSUMED[one // _SIZES] * _ASSUMED_BY_SIZE[one // _SIZES][one % _SIZES] for one in range(CLASSES)]
        # Who waits: blocks by class, in spans by mean use that get coarser with age. A span ends where the next begins.
        self._starts_s = [0.0]
        self._waiting: list[dict[int, int]] = [{}]
        self._ticked_s: float | None = None
        self._learned_s = [0.0] * _GROUPS
        self._requests = 0
        self.rows: list[tuple[float, ...]] = [()] * CLASSES
        for group in range(_GROUPS):
            self._work_out(group)

    def worth(self, kind: int, age_s: float) -> float:
        """Return what keeping a block of class ``kind`` is worth, ``age_s`` seconds after its mean use (0 or more)."""
        return self.rows[kind][bisect_right(_EDGES_S, age_s)]

    # ------------------------------------------------------------ what happens

    def request(self, now_s: float) -> None:
        """Let time go on to a request, before its blocks are told."""
        if self._ticked_s is None:
            self._ticked_s = self._starts_s[0] = now_s
            self._learned_s = [now_s] * _GROUPS
        elif now_s - self._ticked_s >= _TICK_S:
            self._tick(now_s, self._ticked_s)
        self._requests += 1
        if self._requests % _REQUESTS == 0:
            group = self._requests // _REQUESTS % _GROUPS
            self._fade(group, now_s)
            self._work_out(group)

    def waits(self, kind: int, mean_s: float) -> None:
        """Count a block that was used just now; ``mean_s``: its mean use."""
        waiting = self._span(mean_s)
        waiting[kind] = waiting.get(kind, 0) + 1

    def used(self, kind: int, mean_s: float, now_s: float) -> None:
        """Count the next use of a block whose mean use was at ``mean_s``."""
        self.forgotten(kind, mean_s)
        age = bisect_right(_EDGES_S, now_s - mean_s)
        self._uses[kind][age] += 1.0
        self._uses_total[kind] += 1.0
        if not age:  # shorter than a tick: nobody has counted its seconds
            self._waited_s[kind][0] += 0.5 * _TICK_S
            self._expected[kind] += 0.5 * _TICK_S * self._base[kind] * self._fading[0]

    def forgotten(self, kind: int, mean_s: float) -> None:
        """Count a block no more whose mean use was at ``mean_s``."""
        waiting = self._span(mean_s)
        if waiting[kind] > 1:
            waiting[kind] -= 1
        else:
            del waiting[kind]

    def _span(self, mean_s: float) -> dict[int, int]:
        return self._waiting[max(bisect_right(self._starts_s, mean_s) - 1, 0)]

    # ------------------------------------------------------------ counting

    def _tick(self, now_s: float, before_s: float) -> None:
        """Count the seconds since the last tick for all who wait, and begin a new span."""
        passed_s = now_s - before_s
        middle_s = (now_s + before_s) / 2
        starts = self._starts_s
        for at, waiting in enumerate(self._waiting):
            end_s = starts[at + 1] if at + 1 < len(starts) else before_s
            age = bisect_right(_EDGES_S, middle_s - (starts[at] + end_s) / 2)
            for kind, blocks in waiting.items():
                seconds = blocks * passed_s
                self._waited_s[kind][age] += seconds
                self._expected[kind] += seconds * self._base[kind] * self._fading[age]
        self._ticked_s = now_s
        starts.append(now_s)
        self._waiting.append({})
        for at in range(len(starts) - 3, 0, -1):  # two spans become one where that is short beside its age
            if starts[at + 1] - starts[at - 1] <= (now_s - starts[at + 1]) / 6:
                older = self._waiting[at - 1]
                for kind, blocks in self._waiting[at].items():
                    older[kind] = older.get(kind, 0) + blocks
                del self._waiting[at], starts[at]

    def _fade(self, group: int, now_s: float) -> None:
        """Make old counts weigh less."""
        kept = 2.0 ** (-max(now_s - self._learned_s[group], 0.0) / self._learn_half_life_s)
        self._learned_s[group] = now_s
        for kind in range(group * _SIZES, (group + 1) * _SIZES):
            self._uses[kind] = [one * kept for one in self._uses[kind]]
            self._waited_s[kind] = [one * kept for one in self._waited_s[kind]]
            self._uses_total[kind] *= kept
            self._expected[kind] *= kept

    # ------------------------------------------------------------ estimating

    def _by_group(self) -> list[float]:
        """Return by which factor the uses of each group exceed what is assumed."""
        uses = [sum(self._uses_total[group * _SIZES : (group + 1) * _SIZES]) for group in range(_GROUPS)]
        expected = [sum(self._expected[group * _SIZES : (group + 1) * _SIZES]) for group in range(_GROUPS)]
        pace = _ratio(sum(uses[:_SHARED]), sum(expected[:_SHARED]), _GROUP_WEIGHT)
        return [pace * _ratio(one, pace * two, _GROUP_WEIGHT) for one, two in zip(uses, expected, strict=True)]

    def _work_out(self, group: int) -> None:
        """Work out the worth of one group's classes."""
        factors = self._by_group()
        kinds = range(group * _SIZES, (group + 1) * _SIZES)
        rates = []
        for size, kind in enumerate(kinds):
            factor = factors[group]
            if group != _LAST:
                uses = sum(self._uses_total[one * _SIZES + size] for one in range(_SHARED))
                expected = sum(self._expected[one * _SIZES + size] * factors[one] for one in range(_SHARED))
                factor *= _ratio(uses, expected, _GROUP_WEIGHT)
            factor *= _ratio(self._uses_total[kind], self._expected[kind] * factor, _CLASS_WEIGHT)
            rates.append(factor * self._base[kind])
        shape = []
        for age, fading in enumerate(self._fading):
            uses = sum(self._uses[kind][age] for kind in kinds)
            expected = sum(self._waited_s[kind][age] * rate for kind, rate in zip(kinds, rates, strict=True)) * fading
            shape.append(fading * _ratio(uses, expected, _AGE_WEIGHT))
        for kind, rate in zip(kinds, rates, strict=True):
            self.rows[kind] = _falling([rate * one for one in shape])


def _ratio(uses: float, expected: float, weight: float) -> float:
    """Return observed to expected uses, drawn towards 1 by ``weight`` uses."""
    return (uses + weight) / (expected + weight)


def _falling(rates: list[float]) -> tuple[float, ...]:
    """Return the rates by age made to fall: a run of ages whose rates rise gets what it gives as a whole."""
    pools: list[tuple[float, float, int]] = []  # uses, seconds, ages
    alive = 1.0
    for rate, width_s in zip(rates, _WIDTHS_S, strict=True):
        gone = -math.expm1(-rate * width_s)
        uses, seconds, ages = alive * gone, alive * (gone / rate if gone > 1e-9 else width_s), 1
        alive -= uses
        while pools and pools[-1][0] * seconds <= uses * pools[-1][1]:
            before = pools.pop()
            uses, seconds, ages = uses + before[0], seconds + before[1], ages + before[2]
        pools.append((uses, seconds, ages))
    row: list[float] = []
    lowest = math.inf
    for uses, seconds, ages in pools:
        lowest = min(lowest, uses / seconds if seconds > 0.0 else 0.0)
        row.extend([lowest] * ages)
    return tuple(row)
