"""What the kits themselves promise: named checks, readable errors, the same search again, no framework."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
from tests.kit.bad import batching, eviction

from kimicore.errors import PluginError
from kimicore.policies.batching.fcfs import Fcfs
from kimicore.policies.eviction.lru import Lru
from kimicore.policies.padding.packed import Packed
from kimicore.testing import BrokenPromise, check_batching, check_eviction, check_padding, check_policy, kind_of
from kimicore.testing.names import Key, Name, key_of


def test_checks_have_names_and_promises():
    """A kit gives checks whose names differ, each with a sentence, and nothing runs until one is called."""
    checks = check_eviction(Lru)
    assert Counter(check.name for check in checks).most_common(1)[0][1] == 1
    assert all(check.promise and str(check) == f"lru-{check.name}" for check in checks)


def test_a_maker_that_raises_is_a_broken_promise():
    """What cannot even be made breaks the promise about settings, and every other with the same reason."""

    def maker() -> Lru:
        raise KeyError("no default")

    checks = list(check_eviction(maker, examples=2))
    assert [one.name for one in checks] == [one.name for one in check_eviction(Lru)]
    for check in checks:
        with pytest.raises(BrokenPromise, match="no default"):
            check()


def test_the_same_arguments_find_the_same_history():
    """A counterexample can be looked at again: the search is the same in every run."""
    found = []
    for _ in range(2):
        (check,) = [
            one
            for one in check_eviction(lambda: eviction.Good(eviction.RootsFirst), examples=10)
            if one.name == "leaf-first"
        ]
        with pytest.raises(BrokenPromise) as caught:
            check()
        found.append(str(caught.value))
    assert found[0] == found[1]
    assert "which follows it in its sequence" in found[0]


def test_a_bound_is_checked_where_one_is_claimed():
    """The check of starvation is there exactly for policies that claim a bound."""
    without = {check.name for check in check_batching(lambda: batching.Good(batching.GoodState, None))}
    claimed = {check.name for check in check_batching(lambda: batching.Good(batching.GoodState, 0.0))}
    assert claimed - without == {"starvation"}


def test_the_kit_says_what_it_needs(monkeypatch: pytest.MonkeyPatch):
    """Without the package that searches, a check is a PluginError with the command that installs it."""
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    (check,) = [one for one in check_padding(Packed) if one.name == "covers"]
    with pytest.raises(PluginError, match=r"pip install 'kimicore\[testing\]'"):
        check()


def test_the_kit_needs_no_framework():
    """Checks run in a plain interpreter, and the kit is imported without the package that searches."""
    code = """
import sys
sys.modules["pytest"] = None
from kimicore.policies.padding.packed import Packed
from kimicore.testing import check_policy
assert "hypothesis" not in sys.modules and "torch" not in sys.modules
for check in check_policy("padding", Packed, examples=3):
    check()
print("checked")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "checked"


def test_kinds_are_told_from_methods():
    """A policy's kind is seen from its methods, and is nothing where they say too little."""
    assert [kind_of(one) for one in (Fcfs(), Lru(), Packed(), object())] == ["batching", "eviction", "padding", None]
    assert {check.kind for check in check_policy("batching", Fcfs)} == {"batching"}


def test_names_hash_by_their_salt():
    """Names of different salts are equal and hash differently, in every process alike."""
    assert key_of("b1", 0) == key_of("b1", 1) == bytes(key_of("b1"))
    assert hash(key_of("b1", 0)) != hash(key_of("b1", 1))
    assert hash(Key(b"0123456789abcdef", "x", 1)) == hash(Key(b"0123456789abcdef", "y", 1))
    assert Name("a", 1) == "a"
    assert len({hash(Name("a", salt)) for salt in range(4)}) == 4
