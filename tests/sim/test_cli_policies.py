"""Policies at fault, from the shell's side: each is named, with what it did."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kimicore.cli.main import main

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the rigs

from rigs.installed import bad_policies
from rigs.tiny import make_tiny

POISSON = ["--generate", "poisson", "--rate", "4", "--duration", "20", "-q"]
TALKS = ["--generate", "multi-turn", "--rate", "0.5", "--duration", "60", "--cache-only", "--kv-blocks", "20"]
SEED = ["--block-tokens", "64", "-q"]

POLICIES = """
import itertools

from attrs import frozen

from kimicore.contracts import PrecisionRules
from kimicore.policies.batching.fcfs import FcfsState
from kimicore.policies.eviction.lru import LruState
from kimicore.policies.precision.asymmetric import Asymmetric


class Rank(FcfsState):
    def __init__(self, times):
        super().__init__()
        self.left = times

    def rank(self, view, cost):
        self.left -= 1
        if self.left >= 0:
            raise RuntimeError("no order today")
        return super().rank(view, cost)


@frozen
class Batching:
    times: int = 1000
    name: str = "bad<batching>"

    def start(self, limits):
        return Rank(self.times)


class State(LruState):
    def __init__(self, how):
        super().__init__()
        setattr(self, how, self.fail)

    def added(self, *given):
        touched = self.__dict__.pop("touched", None)  # which added() calls as well
        super().added(*given)
        if touched is not None:
            self.touched = touched

    def fail(self, *given):
        raise RuntimeError("not today")


class Endless(LruState):
    def victims(self, count, evictable, now_s):
        return itertools.cycle(super().victims(count, evictable, now_s))


@frozen
class Eviction:
    how: str = "victims"
    name: str = "bad-eviction"

    def start(self, capacity_blocks, ghost_blocks, seed):
        if self.how == "start":
            raise RuntimeError("not today")
        if self.how == "endless":
            return Endless()
        return None if self.how == "none" else State(self.how)


class Precision(Asymmetric):
    def __init__(self, how):
        super().__init__()
        object.__setattr__(self, "how", how)

    def rules(self, modules):
        if self.how == "raises":
            raise RuntimeError("not today")
        if self.how == "junk":
            return PrecisionRules(None, None, None)
        return None if self.how == "none" else super().rules(modules)

    def activation_precision(self):
        return "int8" if self.how == "activations" else super().activation_precision()
"""
KINDS = ("batching", "eviction", "precision")


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with policies that break their promises, on the path."""
    bad_policies(tmp_path, monkeypatch, "bad_shell_policies", POLICIES, KINDS)


def test_a_policy_that_was_set_aside_stands_in_every_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Table and page name it with its faults and who served since, and the JSON names it."""
    out, html = tmp_path / "out.json", tmp_path / "out.html"
    arguments = [*POISSON, "--batching", "bad-batching", "--json", str(out), "--html", str(html)]
    assert main(["simulate", *arguments]) == 0
    said = "broke its promises 16 times and was set aside; the built-in default served since"
    assert f"the batching policy 'bad<batching>' {said}" in capsys.readouterr().out
    page = html.read_text()
    assert f"bad&lt;batching&gt;&#x27; {said}" in page
    assert "batching bad-batching (set aside)" in page
    figures = json.loads(out.read_text())
    assert (figures["policy_faults"], figures["policies_set_aside"]) == (16, ["batching:bad<batching>"])


@pytest.mark.parametrize(("times", "said"), [(1, "promises once; each time"), (3, "promises 3 times; each time")])
def test_a_policy_that_serves_again_is_not_said_to_be_set_aside(
    times: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A few faults are told, and the policy goes on."""
    out = tmp_path / "out.json"
    arguments = ["--batching", "bad-batching", "--set", f"batching.times={times}", "--json", str(out)]
    assert main(["simulate", *POISSON, *arguments]) == 0
    table = capsys.readouterr().out
    assert said in table
    assert "set aside" not in table
    figures = json.loads(out.read_text())
    assert (figures["policy_faults"], figures["policies_set_aside"]) == (times, [])


def test_nothing_is_said_of_policies_that_keep_their_promises(capsys: pytest.CaptureFixture[str]) -> None:
    """There is no line without a fault."""
    assert main(["simulate", *POISSON]) == 0
    assert "fault" not in capsys.readouterr().out


@pytest.mark.parametrize("how", ["start", "none", "added", "touched", "removed", "victims"])
def test_a_bare_cache_names_the_policy_that_failed(how: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever it raises, and where it starts with no state, one line names the policy and the call."""
    arguments = [*TALKS, *SEED, "--eviction", "bad-eviction", "--set", f"eviction.how={how}"]
    assert main(["simulate", *arguments]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "PluginError" in error
    assert "'bad-eviction'" in error
    assert f"{'start' if how == 'none' else how}()" in error


def test_a_bare_cache_reads_an_endless_answer_only_so_far(capsys: pytest.CaptureFixture[str]) -> None:
    """Victims without an end are more than were asked for."""
    assert main(["simulate", *TALKS, *SEED, "--eviction", "bad-eviction", "--set", "eviction.how=endless"]) == 1
    assert "victims" in capsys.readouterr().err


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model."""
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", "rules() failed: RuntimeError('not today')"),
        ("none", "rules() answered None"),
        ("junk", "cannot be applied"),
        ("activations", "activation_precision() answered 'int8'"),
    ],
)
def test_precision_names_the_policy_that_failed(
    how: str, said: str, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A policy that raises, or answers with no rules, is named in one line with what it did."""
    assert main(["precision", str(tiny), "--precision", "bad-precision", "--set", f"how={how}"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "PluginError: precision='asymmetric'" in error
    assert said in error
