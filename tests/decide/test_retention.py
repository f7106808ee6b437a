"""Retention: which cached blocks stay while others can go."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rig import Rig, prompt_of

from kimicore import InvalidRequest, Retention


def _cached(rig: Rig, prompt: list[int]) -> int:
    """Return how many of the prompt's tokens a new request would find."""
    number = rig.submit(prompt, 1)
    rig.finish()
    finished = rig.out[number].finished
    assert finished is not None
    return finished.cached_tokens


def _pressed(rig: Rig, count: int, start: int = 100) -> None:
    for at in range(count):
        rig.submit(prompt_of(65, start + at), 1)
        rig.finish()


def test_a_kept_prompt_outlives_what_came_after_it():
    """Without a wish the oldest prompt goes first; with one it stays while newer ones go."""
    for wish, cached in (((), 0), ((Retention(seconds=1e6),), 64)):
        rig = Rig(slabs=17)
        rig.submit(prompt_of(65, 1), 1, retain=wish)
        rig.finish()
        _pressed(rig, 6)
        assert _cached(rig, prompt_of(65, 1)) == cached
        rig.book.check_integrity()


def test_a_wish_ends_with_its_time():
    """When its seconds are over, a kept prompt goes like any other."""
    rig = Rig(slabs=17)
    rig.submit(prompt_of(65, 1), 1, retain=(Retention(seconds=5.0),))
    rig.finish()
    _pressed(rig, 3)
    rig.clock.advance(10.0)
    _pressed(rig, 6, 200)
    assert _cached(rig, prompt_of(65, 1)) == 0


def test_only_the_range_is_kept():
    """Blocks outside of the range are not kept."""
    rig = Rig(slabs=17)
    rig.submit(prompt_of(65, 1), 1, retain=(Retention(end_tokens=20),))
    rig.finish()
    _pressed(rig, 6)
    assert _cached(rig, prompt_of(65, 1)) == 32  # two blocks hold the first 20 tokens


def test_the_less_important_wish_yields_first():
    """Where kept blocks fill the arena, those of the lowest priority go first, and nobody is refused."""
    rig = Rig(slabs=17)
    for at, priority in ((1, 90), (2, 10), (3, 50)):
        rig.submit(prompt_of(65, at), 1, retain=(Retention(seconds=1e6, priority=priority),))
        rig.finish()
    rig.submit(prompt_of(129, 9), 1)  # needs 9 of 16 blocks, of which 12 are kept
    rig.finish()
    assert [_cached(rig, prompt_of(65, at)) for at in (1, 3, 2)] == [64, 48, 0]
    rig.book.check_integrity()


def test_wishes_never_stop_a_request():
    """With every block kept, the next request still gets its memory."""
    rig = Rig(slabs=9)
    for at in range(5):
        number = rig.submit(prompt_of(100, at), 8, retain=(Retention(seconds=1e9, priority=100),))
        rig.finish()
        assert rig.out[number].finished is not None
    rig.book.check_integrity()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 100), st.sampled_from([None, 0, 50, 100])), max_size=25))
def test_any_mix_of_wishes_keeps_the_books(steps: list[tuple[int, int, int | None]]):
    """Whatever is kept and for how long, every request ends and the ledger agrees with itself."""
    rig = Rig(slabs=12)
    for which, size, priority in steps:
        wish = () if priority is None else (Retention(end_tokens=size, seconds=0.5, priority=priority),)
        number = rig.submit(prompt_of(size, which), 3, retain=wish)
        rig.finish()
        rig.book.check_integrity()
        assert rig.out[number].finished is not None
    assert rig.ledger.faults.count == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"start_tokens": -1}, "start_tokens=-1: must be at least 0"),
        ({"start_tokens": 5, "end_tokens": 5}, "end_tokens=5: must be over start_tokens=5"),
        ({"seconds": 0}, "seconds=0"),
        ({"seconds": float("inf")}, "seconds=inf"),
        ({"priority": 101}, "priority=101: must be from 0 to 100"),
        ({"priority": "high"}, "priority='high': must be an integer"),
    ],
)
def test_a_wrong_wish_is_refused_by_name(fields: dict[str, Any], message: str):
    """A range that is none, a time without an end and a priority off the scale are refused before any work."""
    with pytest.raises(InvalidRequest, match=message):
        Retention(**fields)
