"""Waking whoever waits for a request: a task of asyncio or trio, or a plain thread.

The engine's thread knows no event loop. A waiter makes a :class:`Waker` where it waits; the engine's thread
calls :meth:`Waker.notify`, which is safe from any thread and tells whether the waiter's loop still lives.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol

import anyio

__all__ = ["AsyncWaker", "ThreadWaker", "Waker"]

LOOK_EVERY = 32
"""How many notifications in a row may go unread before the waiter's loop is looked at again."""


class Waker(Protocol):
    """Something that can be woken from any thread."""

    def notify(self) -> bool:
        """Wake the waiter; False where its event loop has ended, so that nobody will ever read."""
        ...


def _scheduler() -> Callable[[Callable[[], Any]], Any]:
    """Return the running loop's thread-safe way to run a callback: trio's where trio runs, else asyncio's."""
    trio = sys.modules.get("trio")
    if trio is not None:
        try:
            schedule: Callable[[Callable[[], Any]], Any] = trio.lowlevel.current_trio_token().run_sync_soon
        except RuntimeError:
            pass
        else:
            return schedule
    return asyncio.get_running_loop().call_soon_threadsafe


class AsyncWaker:
    """Wakes one task of the event loop that it is made on."""

    def __init__(self) -> None:
        self._schedule = _scheduler()
        self._event = anyio.Event()
        self._lock = threading.Lock()
        self._scheduled = False
        self._unread = 0

    def notify(self) -> bool:
        """Wake the waiter; False where its loop has ended. Many calls before it wakes cost few wake-ups."""
        with self._lock:
            self._unread += 1
            if self._scheduled and self._unread % LOOK_EVERY:
                return True
            self._scheduled = True
        try:
            self._schedule(self._set)
        except RuntimeError:  # asyncio: the loop is closed; trio: RunFinishedError is a RuntimeError
            return False
        return True

    def _set(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        """Wait until notified since the last wait; nothing is lost when cancelled."""
        await self._event.wait()
        self._event = anyio.Event()
        with self._lock:
            self._scheduled = False
            self._unread = 0


SIGNAL_S = 0.25
"""How late a waiting thread may hear of a signal."""


class ThreadWaker:
    """Wakes one thread."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def notify(self) -> bool:
        """Wake the waiter."""
        self._event.set()
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until notified since the last wait; False when ``timeout_s`` passed first."""
        if timeout_s is None:
            # A signal that comes just before a thread falls asleep does not wake it: it looks for one now and then.
            while not self._event.wait(SIGNAL_S):
                pass
            woken = True
        else:
            woken = self._event.wait(timeout_s)
        self._event.clear()
        return woken
