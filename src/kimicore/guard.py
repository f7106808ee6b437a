"""Keeping a policy's faults from hurting the engine: counting them, timing its calls, watching one that hangs.

A policy runs on the engine's thread. What it raises or answers wrongly is noted by whoever asked it, and the built-in
default serves that step. Time is measured when the call returns: an answer that came too late is a fault like another.
A call that never returns cannot be cut from within a process; :class:`Watchdog` says where it is.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Sequence
from time import perf_counter

__all__ = ["FAULT_LIMIT", "RAISED", "PolicyFaults", "Watchdog"]

_log = logging.getLogger("kimicore")

RAISED = (Exception, SystemExit, GeneratorExit)
"""What a policy may raise without harm to anybody else; an interrupt is the user's."""
FAULT_LIMIT = 16
"""Faults after which a policy is set aside, where nothing else is said."""


class PolicyFaults:
    """Counts what a policy did wrong, warns about it, and says when it has to be set aside.

    ``kind`` and ``name`` are the policy's; after ``limit`` faults ``set_aside`` is True and the built-in
    default serves for good. ``limit_s``: how long one call may take; None leaves calls untimed. The 1st, 2nd, 4th,
    8th ... fault is logged at warning level.
    """

    __slots__ = ("began_s", "calls", "count", "kind", "last", "limit", "limit_s", "name", "thread", "what")

    def __init__(self, kind: str, name: str, limit: int = FAULT_LIMIT, *, limit_s: float | None = None) -> None:
        self.kind = kind
        self.name = name
        self.limit = limit
        self.limit_s = limit_s
        self.count = 0
        self.last = ""
        self.began_s: float | None = None
        """When the call that is running began, on the clock of ``perf_counter``; None between calls."""
        self.calls = 0
        self.what = ""
        self.thread = 0

    @property
    def set_aside(self) -> bool:
        """Whether the policy is not asked any more."""
        return self.count >= self.limit

    def note(self, promise: str, error: BaseException | None = None) -> None:
        """Count one broken promise; ``error`` is what the policy raised, if it did."""
        self.count += 1
        self.last = promise if error is None else f"{promise}: {error!r}"
        if self.count & (self.count - 1) == 0 or self.count == self.limit:
            then = "it is set aside, the default serves from now on" if self.set_aside else "the default serves"
            _log.warning("%s policy %r, fault %d: %s; %s", self.kind, self.name, self.count, self.last, then)

    def begin(self, what: str) -> None:
        """Note that a call of ``what`` begins; :meth:`end` has to follow."""
        if self.limit_s is not None:
            self.what = what
            self.thread = threading.get_ident()
            self.calls += 1
            self.began_s = perf_counter()

    def end(self) -> bool:
        """Note that the call has returned, or raised; False, and a fault, where it took too long."""
        if self.began_s is None or self.limit_s is None:
            return True
        took_s, self.began_s = perf_counter() - self.began_s, None
        if took_s <= self.limit_s:
            return True
        self.note(f"{self.what} returns within {self.limit_s:g} s (it took {took_s:.3g} s)")
        return False


class Watchdog(threading.Thread):
    """Logs the stack of a policy's call that has not returned after ``patience`` times its limit, once for each call.

    A daemon thread that looks every ``look_s`` seconds; :meth:`stop` ends it.
    """

    def __init__(self, watched: Sequence[PolicyFaults], *, look_s: float = 0.5, patience: float = 10.0) -> None:
        super().__init__(name="kimicore-watchdog", daemon=True)
        self._watched = [one for one in watched if one.limit_s is not None]
        self._look_s = look_s
        self._patience = patience
        self._told: dict[int, int] = {}
        self._ended = threading.Event()

    @property
    def needed(self) -> bool:
        """Whether there is a policy to watch."""
        return bool(self._watched)

    def run(self) -> None:
        """Look until stopped."""
        while not self._ended.wait(self._look_s):
            for index, one in enumerate(self._watched):
                self.look(index, one)

    def look(self, index: int, one: PolicyFaults) -> None:
        """Log the stack of a policy's running call where it hangs."""
        call, began_s, limit_s = one.calls, one.began_s, one.limit_s
        if began_s is None or limit_s is None or self._told.get(index) == call:
            return
        since_s = perf_counter() - began_s
        if since_s < self._patience * limit_s:
            return
        frame = sys._current_frames().get(one.thread)
        if one.calls != call or one.began_s is None:
            return  # it has just returned
        self._told[index] = call
        stack = "".join(traceback.format_stack(frame)) if frame is not None else "its thread is gone\n"
        _log.error(
            "%s policy %r: %s has not returned for %.1f s and the engine waits for it; it cannot be cut within a "
            "process. It is here:\n%s",
            one.kind, one.name, one.what, since_s, stack,
        )  # fmt: skip

    def stop(self) -> None:
        """End the thread; it may take until its next look."""
        self._ended.set()
