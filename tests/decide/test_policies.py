"""Policies by name, what is installed beside them, and what the built-in ones promise."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rigs.installed import distribution

from kimicore.errors import ConfigError, PluginError
from kimicore.guard import PolicyFaults
from kimicore.plugins import KINDS, known, resolve
from kimicore.policies.padding.max_len import MaxLen


def test_every_built_in_can_be_made():
    """Each built-in is found under its own name."""
    for kind, names in KINDS.items():
        for name in names:
            assert resolve(kind, name).name == name


def test_an_unknown_name_lists_the_known_ones():
    """An unknown policy or kind is a PluginError that says what there is."""
    with pytest.raises(PluginError, match=r"eviction='best'.*lru"):
        resolve("eviction", "best")
    with pytest.raises(PluginError, match="batching, eviction, padding"):
        resolve("speed", "best")


def test_settings_reach_the_policy():
    """Settings are the policy's own; a bad value and an unknown one are ConfigErrors that name them."""
    assert resolve("batching", "priority", {"aging_s": 2.0}).aging_s == 2.0
    with pytest.raises(ConfigError, match="aging_s"):
        resolve("batching", "priority", {"aging_s": 0})
    with pytest.raises(ConfigError, match=r"policy\.batching\.speed: 'fcfs' has no such setting; it has: none"):
        resolve("batching", "fcfs", {"speed": 1})
    with pytest.raises(ConfigError, match=r"did you mean 'aging_s'"):
        resolve("batching", "priority", {"ageing_s": 1})
    with pytest.raises(PluginError, match=r"did you mean 'priority'"):
        resolve("batching", "prioritty")


PADDING = "from kimicore.policies.padding.packed import Packed as Base\n"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("class Mine:\n    name = 'mine'\n", "is no padding policy: it lacks shape, waste_tokens, shapes"),
        (f"{PADDING}class Mine(Base):\n    name = property()\n    def __init__(self): 1 / 0\n", "division by zero"),
        (f"{PADDING}def Mine(): return Base\n", "calling it gives a class"),
    ],
)
def test_what_is_no_policy_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str):
    """An entry point that gives something else than a policy of its kind is an error that says what is missing."""
    (tmp_path / "odd_policy.py").write_text(source)
    distribution(tmp_path, "odd", "[kimicore.padding]\nodd = odd_policy:Mine\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    with pytest.raises(PluginError, match=message):
        resolve("padding", "odd")
    sys.modules.pop("odd_policy")


def test_an_installed_policy_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A policy of an installed package is found by name and imported only when asked for."""
    (tmp_path / "mine_policy.py").write_text(f"{PADDING}def Mine(): return Base(name='mine')\n")
    distribution(tmp_path, "mine", "[kimicore.padding]\nmine = mine_policy:Mine\nbroken = no_such_module:Thing\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert known("padding")["mine"] == "mine"
    assert "mine_policy" not in sys.modules
    assert resolve("padding", "packed").name == "packed"
    assert "mine_policy" not in sys.modules
    assert resolve("padding", "mine").name == "mine"
    with pytest.raises(PluginError, match=r"broken.*no_such_module"):
        resolve("padding", "broken")
    sys.modules.pop("mine_policy")


def test_a_built_in_is_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A package that claims a built-in's name, or two that claim one name, are an error when that name is asked for."""
    distribution(tmp_path, "one", "[kimicore.padding]\npacked = one:One\nshared = one:One\n")
    distribution(tmp_path, "two", "[kimicore.padding]\nshared = two:Two\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert resolve("padding", "max-len").name == "max-len"
    assert known("padding")["packed"].startswith("built in, one: claimed more than once")
    assert known("padding")["shared"].startswith("one, two: claimed more than once")
    assert known("padding")["lcm"] == "built in"
    with pytest.raises(PluginError, match=r"more than once.*built in"):
        resolve("padding", "packed")
    with pytest.raises(PluginError, match=r"more than once.*one.*two"):
        resolve("padding", "shared")


def test_a_malformed_neighbour_does_not_hide_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """A package whose entry points cannot be read costs nothing but a warning."""
    (tmp_path / "good_policy.py").write_text(f"{PADDING}def Good(): return Base(name='good')\n")
    distribution(tmp_path, "aaa", "this is not\n[an ini file\n")
    distribution(tmp_path, "bad", "[kimicore.padding]\nbad = 1 + 1\n")
    distribution(tmp_path, "good", "[kimicore.padding]\ngood = good_policy:Good\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    with caplog.at_level(logging.WARNING, "kimicore"):
        assert resolve("padding", "good").name == "good"
    assert "aaa" in caplog.text
    sys.modules.pop("good_policy")


def test_faults_are_logged_less_and_less(caplog: pytest.LogCaptureFixture):
    """The first fault is a warning with its cause, later ones are not logged each, and the last says what follows."""
    faults = PolicyFaults("padding", "mine", limit=10)
    with caplog.at_level(logging.WARNING, "kimicore"):
        for _ in range(10):
            faults.note("shape() answers", KeyError("x"))
    assert len(caplog.records) == 5
    assert "KeyError('x')" in caplog.text
    assert "set aside" in caplog.records[-1].getMessage()
    assert faults.set_aside


@given(st.integers(1, 100_000), st.integers(1, 64))
def test_powers_of_two_cover_and_waste_less_than_half(size: int, smallest: int):
    """The padded size covers the real one, is the smallest times a power of two, and under twice the real one."""
    shape = MaxLen(smallest=smallest).shape(size, size, size)
    assert shape.tokens == shape.rows == shape.blocks
    ratio = shape.tokens // smallest
    assert shape.tokens == ratio * smallest >= size
    assert ratio & (ratio - 1) == 0
    assert shape.tokens < 2 * size or shape.tokens == smallest


def test_lru_asks_for_what_it_names():
    """The policy names exactly blocks that it was told may go, oldest use first, also after some were held."""
    state = resolve("eviction", "lru").start(10, 40, 0)
    keys = [bytes([at]) for at in range(6)]
    for at, key in enumerate(keys):
        state.added(key, None, at, float(at))
    held = {keys[0], keys[2]}
    asked = SimpleNamespace(evictable=lambda key: key not in held)
    assert state.victims(2, asked.evictable, 9.0) == [keys[1], keys[3]]
    state.removed(keys[1])
    state.removed(keys[3])
    state.touched(keys[0], 10.0)
    held.clear()
    assert state.victims(4, asked.evictable, 11.0) == [keys[4], keys[5], keys[0], keys[2]]
