"""Policies that fail on purpose, for tests of what an application does then.

.. code-block:: python

    engine = FakeEngine(eviction=Raising(Lru(), on="victims", every=3))

Each wraps the settings of a policy and is the settings of a policy of the same kind; the name stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kimicore.errors import ConfigError
from kimicore.types import Shape

__all__ = ["Nonsense", "Raising", "Slow"]

_STARTED = {
    "batching": ("rank",),
    "eviction": ("added", "touched", "removed", "importance", "victims"),
}
_OWN = {"padding": ("shape", "waste_tokens", "shapes"), "precision": ("rules",)}
_WRONG: dict[str, Any] = {
    "rank": None,
    "victims": (b"no such block", None, 7),
    "shape": Shape(0, 0, 0),
    "waste_tokens": -1,
    "shapes": 0,
    "rules": None,
}


class _Wrapped:
    """Calls through to a policy, and does something else at every ``every``-th call of its method ``on``."""

    def __init__(self, policy: Any, on: str, every: int) -> None:
        known = [name for names in (*_STARTED.values(), *_OWN.values()) for name in names]
        if on not in known:
            raise ConfigError(f"on={on!r}: no policy has such a method; they are {', '.join(known)}")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ConfigError(f"every={every!r}: must be an integer of at least 1")
        self.policy = policy
        self.on = on
        self.every = every
        self.name = policy.name
        self.calls = 0
        """How often the method was called, over all running states."""
        if hasattr(policy, on):
            setattr(self, on, self._instead_of(getattr(policy, on)))
        elif not hasattr(policy, "start"):
            raise ConfigError(f"on={on!r}: the policy {policy.name!r} has no such method")

    def __getattr__(self, name: str) -> Any:
        if name == "policy":  # not yet set
            raise AttributeError(name)
        return getattr(self.policy, name)

    def start(self, *arguments: Any) -> Any:
        """Start the wrapped policy and return its state, with the method changed."""
        state = self.policy.start(*arguments)
        if not hasattr(state, self.on):
            raise ConfigError(f"on={self.on!r}: the state of the policy {self.name!r} has no such method")
        return _State(state, self.on, self._instead_of(getattr(state, self.on)))

    def _instead_of(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls += 1
            if self.calls % self.every:
                return method(*arguments)
            return self.fault(method, arguments)

        return call

    def fault(self, method: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Do what is done in place of a call."""
        raise NotImplementedError


class _State:
    """A running policy with one method changed."""

    def __init__(self, state: Any, on: str, method: Callable[..., Any]) -> None:
        self._state = state
        for names in _STARTED.values():
            for name in names:
                if hasattr(state, name):
                    setattr(self, name, getattr(state, name))
        setattr(self, on, method)

    def __getattr__(self, name: str) -> Any:
        if name == "_state":
            raise AttributeError(name)
        return getattr(self._state, name)


class Raising(_Wrapped):
    """Raises ``error`` at every ``every``-th call of ``on``, such as "victims", "rank" or "shape"."""

    def __init__(self, policy: Any, on: str, every: int = 1, error: BaseException | None = None) -> None:
        super().__init__(policy, on, every)
        self.error = error if error is not None else RuntimeError(f"{on}() fails on purpose")

    def fault(self, method: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Raise."""
        raise self.error


class Slow(_Wrapped):
    """Takes ``seconds`` longer at every ``every``-th call of ``on``.

    ``wait``: called with the seconds; a test hands in the ``advance`` of its clock, so that nobody really waits.
    """

    def __init__(
        self, policy: Any, on: str, seconds: float, every: int = 1, wait: Callable[[float], object] = time.sleep
    ) -> None:
        super().__init__(policy, on, every)
        self.seconds = seconds
        self.wait = wait

    def fault(self, method: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Wait, and then answer."""
        self.wait(self.seconds)
        return method(*arguments)


class Nonsense(_Wrapped):
    """Gives a wrong answer at every ``every``-th call of ``on``, which is a question.

    ``answer``: called with the right answer, returns the wrong one; None takes one that breaks the method's promise.
    """

    def __init__(self, policy: Any, on: str, every: int = 1, answer: Callable[[Any], Any] | None = None) -> None:
        super().__init__(policy, on, every)
        if answer is None and on not in _WRONG:
            raise ConfigError(f"on={on!r}: nothing is asked there; questions are {', '.join(_WRONG)}")
        self.answer = answer

    def fault(self, method: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Answer wrongly."""
        right = method(*arguments)
        return _WRONG[self.on] if self.answer is None else self.answer(right)
