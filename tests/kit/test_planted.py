"""The kits catch what they are there for: each planted fault is found by the check of the promise that it breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.kit.bad import batching, eviction, padding, precision

from kimicore.policies.precision import ResolvedMap
from kimicore.testing import BrokenPromise, Check, check_batching, check_eviction, check_padding, check_precision

KITS: dict[str, Callable[..., list[Check]]] = {
    "batching": check_batching,
    "eviction": check_eviction,
    "padding": check_padding,
    "precision": check_precision,
}
PLANTED = {
    "batching": (batching.Good, batching.BAD),
    "eviction": (eviction.Good, eviction.BAD),
    "padding": (padding.Good, padding.BAD),
    "precision": (precision.Good, precision.BAD),
}
CASES = [
    pytest.param(kind, promise, maker, id=f"{kind}-{promise}-{at}")
    for kind, (_, bad) in PLANTED.items()
    for at, (promise, maker) in enumerate(bad)
]


def broken(kind: str, maker: Callable[[], Any], *, engine: bool) -> dict[str, BrokenPromise]:
    """Run a kit, with its check of the whole ``engine`` or without, and return what it says, by check."""
    found = {}
    for check in KITS[kind](maker, examples=30):
        if engine or check.name != "engine":
            try:
                check()
            except BrokenPromise as error:
                found[check.name] = error
    return found


@pytest.mark.parametrize("kind", KITS)
def test_good_twins_pass(kind: str):
    """A policy that keeps every promise passes every check."""
    assert broken(kind, PLANTED[kind][0], engine=True) == {}


@pytest.mark.parametrize(("kind", "promise", "maker"), CASES)
def test_a_planted_fault_is_found_by_its_own_check(kind: str, promise: str, maker: Callable[[], Any]):
    """A broken promise fails the check of that name and no other, and the error reads as a history."""
    found = broken(kind, maker, engine=promise == "engine")
    assert found.keys() == {promise}
    error = found[promise]
    assert (error.kind, error.policy, error.check) == (kind, "planted", promise)
    lines = str(error).splitlines()
    assert f"'planted' breaks a promise, {promise}: {error.promise}" in lines[0]
    assert lines[1] == f"  found: {error.found}"
    assert lines[-1].endswith(error.events[-1])


@pytest.mark.parametrize("kind", KITS)
def test_every_promise_has_a_planted_fault(kind: str):
    """No check is there that was never seen to fail."""
    names = {check.name for check in KITS[kind](PLANTED[kind][0])}
    unseen = {"round-trip"} if kind == "precision" else {"engine"} if kind == "padding" else set()
    assert {promise for promise, _ in PLANTED[kind][1]} == names - unseen


def test_a_padding_fault_is_seen_in_the_engine():
    """A shape that is too small for a real step is noted inside the engine as well."""
    assert broken("padding", padding.FewRows, engine=True).keys() == {"covers", "engine"}


def test_a_map_that_does_not_come_back_is_found(monkeypatch: pytest.MonkeyPatch):
    """A precision map that is another one after it was written and read breaks the round trip."""
    real = ResolvedMap.to_json
    monkeypatch.setattr(ResolvedMap, "to_json", lambda self: real(self).replace("int8", "float32"))
    assert broken("precision", precision.Good, engine=True).keys() == {"round-trip"}


def test_victims_without_an_end_are_too_many():
    """An answer that never ends is read only as far as it takes to say so."""
    (check,) = [
        one for one in check_eviction(lambda: eviction.Good(eviction.Endless), examples=5) if one.name == "enough"
    ]
    with pytest.raises(BrokenPromise):
        check()
