"""``kimicore check-policy`` and ``kimicore policies``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kimicore.cli.main import main
from kimicore.plugins import KINDS


def test_policies_lists_every_policy(capsys: pytest.CaptureFixture[str]):
    """Every built-in stands there with its kind and where it comes from; one kind can be asked for."""
    assert main(["policies"]) == 0
    rows = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    for kind, names in KINDS.items():
        for name in names:
            assert [kind, name, "built in"] in rows
    assert main(["policies", "padding"]) == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} == {"padding"}


@pytest.mark.parametrize("words", [["packed"], ["padding", "packed"], ["kimicore.policies.padding.packed:Packed"]])
def test_a_kept_promise_is_ok(words: list[str], capsys: pytest.CaptureFixture[str]):
    """A policy is found by its name, by kind and name, or as module and class, and each promise is printed."""
    assert main(["check-policy", *words, "--examples", "3"]) == 0
    out = capsys.readouterr().out
    assert "padding policy packed: Packed(name='packed')" in out
    assert "ok      covers        a shape is at least as large as the step" in out
    assert out.endswith("9 of 9 promises kept\n")


def test_a_broken_promise_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """A broken promise gives status 1 and the counterexample; the module may lie in the folder one stands in."""
    (tmp_path / "boasting.py").write_text(
        "from kimicore.policies.padding.max_len import MaxLen\n"
        "class Boasting(MaxLen):\n    def waste_tokens(self, tokens):\n        return 0\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *sys.path])
    assert (
        main(["check-policy", "boasting:Boasting", "--set", "smallest=4", "--check", "waste", "--check", "covers"]) == 1
    )
    out = capsys.readouterr().out
    assert "BROKEN  waste" in out
    assert "0 are claimed" in out
    assert "ok      covers" in out
    assert out.endswith("1 of 2 promises kept\n")


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["nowhere"], 2, "no policy 'nowhere' of any kind"),
        (["eviction"], 2, "a policy's name is missing after the kind; they are activity-importance, arc"),
        (["speed", "lru"], 2, "no such kind"),
        (["a", "b", "c"], 2, "name one policy"),
        (["no_such_module:Thing"], 2, "no_such_module"),
        (["builtins:object"], 2, "its kind cannot be told"),
        (["lru", "--set", "size"], 2, "KEY=VALUE"),
        (["lru", "--set", "size=3"], 2, "size"),
        (["lru", "--examples", "0"], 2, "--examples 0"),
        (["lru", "--check", "speed"], 2, "leaf-first"),
    ],
)
def test_wrong_usage_is_refused(words: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]):
    """What cannot be understood is refused in one line that says what can."""
    assert main(["check-policy", *words]) == status
    assert said in capsys.readouterr().err
