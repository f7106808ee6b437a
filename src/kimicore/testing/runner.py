"""A runner without a device, whose tokens depend on everything that a row can see through its block tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from attrs import field, frozen

from kimicore.block_records import kinds_of
from kimicore.types import BoundRow, BoundStep, KVClass, KVPrecision, RowResult, StepResult, TokenScores

__all__ = ["FakeRunner", "fake_tokens"]

_MASK = (1 << 64) - 1
_POISON = -1
_LOST: Final[Mapping[KVPrecision, int]] = {"full": 0, "int8": 0xFF, "int4": 0xFFF}


def _mix(value: int, more: int) -> int:
    value = (value ^ (more + 0x9E3779B97F4A7C15 + (value << 6) + (value >> 2))) & _MASK
    value = (value * 0xBF58476D1CE4E5B9) & _MASK
    return value ^ (value >> 29)


def _entry(before: int, token: int, position: int) -> int:
    return _mix(_mix(before, token), position)


def _rounded(entry: int, precision: KVPrecision) -> int:
    """Return what is left of an entry once its block is whole."""
    return entry & ~_LOST[precision]


def _choose(seen: Sequence[Sequence[int]], seed: int, choice: int, vocabulary: int, banned: Sequence[int]) -> int:
    value = _mix(seed, choice)
    for entries in seen:
        value = _mix(value, sum(entries) & _MASK)
    token = value % vocabulary
    while token in banned:
        token = (token + 1) % vocabulary
    return token


def fake_tokens(
    prompt: Sequence[int],
    count: int,
    windows: Sequence[int | None] = (None,),
    *,
    seed: int = 0,
    choice: int = 0,
    vocabulary: int = 1000,
    banned: Sequence[int] = (),
    min_tokens: int = 0,
    precision: KVPrecision = "full",
    block_tokens: int = 16,
) -> list[int]:
    """Return the tokens that a :class:`FakeRunner` gives this prompt when nothing goes wrong; it needs no blocks."""
    known = list(prompt)
    entries: list[int] = []
    while len(known) < len(prompt) + count:
        for position in range(len(entries), len(known)):
            if position and position % block_tokens == 0:
                entries[-block_tokens:] = [_rounded(entry, precision) for entry in entries[-block_tokens:]]
            entries.append(_entry(entries[-1] if entries else 0, known[position], position))
        seen = [entries if window is None else entries[-window:] for window in windows]
        now = banned if len(known) - len(prompt) < min_tokens else ()
        known.append(_choose(seen, seed, choice, vocabulary, now))
    return known[len(prompt) :]


@frozen(eq=False)
class FakeRunner:
    """Runs bound steps on a make-believe arena; a wrong, stale or foreign block changes the tokens.

    ``classes``: the KV classes; ``slots``: how many slots each has. ``vocabulary``: token ids are below it.
    ``fault``: called with each row; an exception that it *returns* is that row's error, one that it raises fails the
    step. ``seconds``: called with the step, gives ``step_s``. ``after``: called at the end of each step with its
    seconds (a clock's ``advance``, for example).

    Every position's entry depends on its token, on its number and on the entry before it, so an entry stands for all
    tokens up to its own, as in a real model. Each row checks that what it writes belongs to it alone. Under another
    precision than "full" entries are written to the tail class, and rounded into the other one when a block is whole.
    """

    classes: tuple[KVClass, ...]
    slots: tuple[int, ...]
    vocabulary: int = 1000
    fault: Callable[[BoundRow], BaseException | None] | None = None
    seconds: Callable[[BoundStep], float] | None = None
    after: Callable[[float], None] | None = None
    arenas: list[dict[int, list[int]]] = field(init=False, factory=list)
    _kinds: dict[KVPrecision, tuple[int, ...]] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self.arenas.extend({} for _ in self.classes)
        self._kinds.update(kinds_of(self.classes))

    def run(self, step: BoundStep) -> StepResult:
        """Compute the step."""
        self._write_padding(step)
        written: set[tuple[int, int]] = set()
        results = []
        for row in step.rows:
            error = None if self.fault is None else self.fault(row)
            self._compute(row, written)
            results.append(RowResult(error=error) if error is not None else self._result(row))
        seconds = 0.0 if self.seconds is None else self.seconds(step)
        if self.after is not None:
            self.after(seconds)
        return StepResult(tuple(results), None, seconds)

    def close(self) -> None:
        """Nothing is held."""

    def block(self, kind: int, slot: int) -> list[int]:
        """Return a block's entries, to be read or changed."""
        if not 0 <= slot < self.slots[kind]:
            raise AssertionError(f"slot {slot} is outside of class {kind}, which has {self.slots[kind]}")
        size = self.classes[kind].shape[3]
        return self.arenas[kind].setdefault(slot, [_POISON] * size)

    def _write_padding(self, step: BoundStep) -> None:
        used = sum(row.plan.count for row in step.rows)
        if used > step.shape.tokens or len(step.rows) > step.shape.rows:
            raise AssertionError(f"{len(step.rows)} rows of {used} tokens do not fit into {step.shape}")
        for kind in range(len(self.classes)):
            block = self.block(kind, 0)
            block[:] = [step.number] * len(block)

    def _compute(self, row: BoundRow, written: set[tuple[int, int]]) -> None:
        start, count = row.plan.start, row.plan.count
        size = self.classes[0].shape[3]
        for kind in self._kinds[row.precision]:
            table = row.tables[kind]
            for at in range(start // size, -(-(start + count) // size)):
                slot = table[at]
                if slot == 0 or (kind, slot) in written:
                    raise AssertionError(f"request {row.plan.request} writes slot {slot} of class {kind}, not its own")
                written.add((kind, slot))
        for position in range(start, start + count):
            at, offset = divmod(position, size)
            for kind, tail in self._pairs(row.precision):
                before = 0
                if position:
                    last = kind if offset == 0 else tail
                    before = self.block(last, row.tables[last][(position - 1) // size])[(position - 1) % size]
                block = self.block(tail, row.tables[tail][at])
                block[offset] = _entry(before, row.known[position], position)
                if kind != tail and offset == size - 1:
                    whole = [_rounded(entry, row.precision) for entry in block]
                    self.block(kind, row.tables[kind][at])[:] = whole

    def _result(self, row: BoundRow) -> RowResult:
        end = row.plan.start + row.plan.count
        tokens: tuple[int, ...] = ()
        if row.sample:
            seen = [self._seen(row, kind, tail, end - 1) for kind, tail in self._pairs(row.precision)]
            tokens = (_choose(seen, row.seed, row.choice, self.vocabulary, row.banned),)
        prompt_scores = None
        if row.plan.logits_at == "all":
            stop = min(end + 1, row.prompt_tokens)
            prompt_scores = tuple(TokenScores(-float(at)) for at in range(row.plan.start + 1, stop))
        logprobs = None
        if tokens and row.params.logprobs is not None:
            logprobs = (TokenScores(-float(end)),)
        return RowResult(tokens, logprobs, prompt_scores)

    def _pairs(self, precision: KVPrecision) -> list[tuple[int, int]]:
        """Return the classes that whole blocks are in, each with the one in which its blocks are filled."""
        kinds = self._kinds[precision]
        tails = [kind for kind in kinds if self.classes[kind].tail]
        mains = [kind for kind in kinds if not self.classes[kind].tail]
        return list(zip(mains, tails or mains, strict=True))

    def _seen(self, row: BoundRow, kind: int, tail: int, position: int) -> list[int]:
        window = self.classes[kind].window
        size = self.classes[kind].shape[3]
        first = 0 if window is None else max(0, position - window + 1)
        entries: list[int] = []
        for at in range(first // size, position // size + 1):
            own = tail if at == position // size else kind
            slot = row.tables[own][at]
            if slot == 0:
                raise AssertionError(f"position {position} sees block {at} of class {own}, which is gone")
            entries.extend(self.block(own, slot))
        shift = first // size * size
        return entries[first - shift : position + 1 - shift]
