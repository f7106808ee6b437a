"""Ctrl-C in the blocking engine: it ends the call and its request, and nothing else."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kimicore import Choice, EngineConfig, SyncEngine
from kimicore.types import BoundStep
from rigs.runners import around

Alone = Callable[..., Choice]
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
SMALL: dict[str, Any] = {"dtype": "float32", "kv_device_bytes": "1MiB"}


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Have SIGINT raise KeyboardInterrupt, also where whoever started the tests has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_cancels_the_call(tiny: Path, alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a blocking call ends that call and its request; the engine serves on (hw-native-sys/pypto-lib#274)."""
    with SyncEngine(tiny, EngineConfig(**SMALL)) as engine:
        engine.open()
        cancel, cancelled = engine.face.cancel, threading.Event()

        def noted(handle: Any) -> None:
            cancel(handle)
            cancelled.set()

        def interrupt(step: BoundStep) -> None:
            if len(runner.steps) == 3:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                cancelled.wait(60)  # or a busy machine would let the request end before its caller hears of the signal

        monkeypatch.setattr(engine.face, "cancel", noted)
        with around(engine, interrupt) as runner, pytest.raises(KeyboardInterrupt):
            engine.generate([5], max_tokens=8000, **GREEDY)
        assert engine.generate([5], max_tokens=4, **GREEDY).choices[0] == alone([5], max_tokens=4, **GREEDY)
        assert engine.stats().requests_cancelled == 1
        assert engine.stats().kv_blocks_used == 0


def test_an_interrupt_right_after_submission_cancels_too(
    tiny: Path, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C before a call has its request's handle leaves nothing running."""
    with SyncEngine(tiny, EngineConfig(**SMALL)) as engine:
        engine.open()
        submit = engine.face.submit

        def interrupted(*args: Any, **more: Any) -> None:
            submit(*args, **more)
            raise KeyboardInterrupt

        monkeypatch.setattr(engine.face, "submit", interrupted)
        for call in (engine.generate, engine.stream, lambda ids, **more: engine.generate_many([ids, ids], **more)):
            with pytest.raises(KeyboardInterrupt):
                call([5], max_tokens=8000, **GREEDY)
        monkeypatch.undo()
        assert engine.generate([5], max_tokens=4, **GREEDY).choices[0] == alone([5], max_tokens=4, **GREEDY)
        assert engine.stats().requests_cancelled == 3
        assert engine.stats().kv_blocks_used == 0
