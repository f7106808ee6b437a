"""The check that every kind begins with: what a maker makes is a settings record of its kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kimicore.guard import RAISED
from kimicore.testing.promises import Story

__all__ = ["check_settings"]

_METHODS = {
    "batching": ("start",),
    "eviction": ("start",),
    "padding": ("shape", "waste_tokens", "shapes"),
    "precision": ("rules",),
}


def check_settings(kind: str, maker: Callable[[], Any], start: Callable[[Any], Any] | None, state: type | None) -> None:
    """Search the settings of a policy for what its kind needs; ``state`` is the protocol of what ``start`` gives."""
    story = Story()
    error = None
    made: Any = None
    story.tell("the maker is called without arguments")
    try:
        made = maker()
    except RAISED as raised:
        error = raised
    if error is not None:
        story.end(f"it raised {error!r}; every setting needs a default")
    if isinstance(made, type):
        story.end(f"it gave the class {made.__name__} instead of an instance")
    name = getattr(made, "name", None)
    if not isinstance(name, str) or not name:
        story.end(f"its name is {name!r}; a name is a string that is not empty")
    for method in _METHODS[kind]:
        if not callable(getattr(made, method, None)):
            story.end(f"it has no method {method}(), which a {kind} policy needs")
    _check_frozen(made, story)
    if start is not None and state is not None:
        _check_states(made, start, state, story)


def _check_frozen(made: Any, story: Story) -> None:
    story.tell("its name is set anew")
    try:
        setattr(made, "name", made.name)  # noqa: B010
    except RAISED:
        return
    story.end("that changed it: settings are shared and have to be frozen, as @attrs.frozen makes them")


def _check_states(made: Any, start: Callable[[Any], Any], state: type, story: Story) -> None:
    story.tell("start() is called twice")
    error = None
    states: list[Any] = []
    try:
        states = [start(made), start(made)]
    except RAISED as raised:
        error = raised
    if error is not None:
        story.end(f"it raised {error!r}")
    if states[0] is states[1]:
        story.end("both calls gave the same object; each engine and each KV class needs a state of its own")
    missing = [name for name in _public(state) if not callable(getattr(states[0], name, None))]
    if missing:
        story.end(f"the state lacks {', '.join(f'{name}()' for name in missing)}")


def _public(protocol: type) -> list[str]:
    return [name for name, value in vars(protocol).items() if callable(value) and not name.startswith("_")]
