"""Loops, threads, processes, opening and closing: an engine belongs to none of them and outlives what it may."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from kimicore import Choice, ConfigError, Engine, EngineClosed, EngineConfig, ModelLoadError, SyncEngine
from rigs.chain import START
from rigs.runners import gated
from rigs.settle import read, settled

Alone = Callable[..., Choice]
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
SMALL: dict[str, Any] = {"dtype": "float32", "kv_device_bytes": "1MiB"}
BACKENDS = ("asyncio", "trio")


async def _two_texts(engine: Engine) -> tuple[str, str]:
    whole = await engine.generate([5, 6], max_tokens=10, **GREEDY)
    chunks = await read(engine.stream([5, 6], max_tokens=10, **GREEDY))
    return whole.text, "".join(chunk.text for chunk in chunks)


@pytest.mark.parametrize("second", BACKENDS)
@pytest.mark.parametrize("first", BACKENDS)
def test_one_engine_serves_one_loop_after_another(tiny: Path, alone: Alone, first: str, second: str) -> None:
    """An engine made outside of a loop, or inside an earlier one, serves the next (vllm-project/vllm#17208)."""
    expected = alone([5, 6], max_tokens=10, **GREEDY).text
    engine = Engine(tiny, EngineConfig(**SMALL))
    for backend in (first, second):
        assert anyio.run(_two_texts, engine, backend=backend) == (expected, expected)

    async def make() -> Engine:
        inner = Engine(tiny, EngineConfig(**SMALL))
        await _two_texts(inner)
        return inner

    inside = anyio.run(make, backend=first)
    assert anyio.run(_two_texts, inside, backend=second) == (expected, expected)
    for one in (engine, inside):
        anyio.run(one.aclose, backend=second)


def test_one_engine_serves_several_loops_at_once(shared: Engine, alone: Alone) -> None:
    """Loops of both kinds in several threads use one engine at the same time (vllm-project/vllm#17208)."""
    expected = alone([5, 6], max_tokens=10, **GREEDY).text
    texts: list[tuple[str, str]] = []

    def use(backend: str) -> None:
        async def several() -> None:
            for _ in range(5):
                texts.append(await _two_texts(shared))

        anyio.run(several, backend=backend)

    threads = [threading.Thread(target=use, args=(backend,)) for backend in BACKENDS * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [(expected, expected)] * 20
    anyio.run(settled, shared)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stream_outlived_by_its_engine_ends(shared: Engine, backend: str) -> None:
    """A stream that is kept though its event loop has ended does not run on for nobody (BerriAI/litellm#31499)."""
    kept: list[Any] = []
    before = shared.stats().requests_cancelled

    async def begin() -> None:
        stream = shared.stream([5], max_tokens=8000, **GREEDY)
        kept.append(stream)
        await anext(stream)
        await shared.generate([6], max_tokens=5, **GREEDY)  # meanwhile the stream has unread chunks

    anyio.run(begin, backend=backend)
    anyio.run(lambda: shared.generate([6], max_tokens=200, **GREEDY))
    anyio.run(settled, shared)
    assert shared.stats().requests_cancelled == before + 1


def test_threads_share_a_plain_engine(tiny: Path, alone: Alone) -> None:
    """Many threads use one synchronous engine, and their requests share steps (vllm-project/vllm#17208)."""
    with SyncEngine(tiny, EngineConfig(**SMALL)) as engine:
        found: dict[int, Choice] = {}

        def use(at: int) -> None:
            for _ in range(3):
                found[at] = engine.generate([5 + at], max_tokens=8, **GREEDY).choices[0]
            streamed = "".join(chunk.text for chunk in engine.stream([5 + at], max_tokens=8, **GREEDY))
            assert streamed == found[at].text

        threads = [threading.Thread(target=use, args=(at,)) for at in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [found[at] for at in range(8)] == [alone([5 + at], max_tokens=8, **GREEDY) for at in range(8)]
        many = engine.generate_many([[5 + at] for at in range(8)], max_tokens=8, **GREEDY)
        assert [one.choices[0] for one in many] == [found[at] for at in range(8)]
        assert engine.stats().kv_blocks_used == 0


# ---------------------------------------------------------------- closing


@pytest.mark.parametrize("backend", BACKENDS)
def test_closing_ends_what_is_pending(tiny: Path, backend: str) -> None:
    """Closing ends running and queued requests with EngineClosed, may be repeated and may happen at once in several
    tasks; later calls raise at once (hw-native-sys/pypto-lib#274)."""

    async def main() -> None:
        engine = Engine(tiny, EngineConfig(max_batch_size=1, **SMALL))
        ended: list[int] = []

        async def pending(at: int) -> None:
            whole, stream = engine.generate, lambda *a, **k: read(engine.stream(*a, **k))
            with pytest.raises(EngineClosed):
                await (whole if at % 2 else stream)([5 + at], max_tokens=4000, **GREEDY)
            ended.append(at)

        async with anyio.create_task_group() as group, engine.stream([4], max_tokens=4000, **GREEDY) as stream:
            await anext(stream)
            for at in range(4):
                group.start_soon(pending, at)
            await anyio.wait_all_tasks_blocked()
            async with anyio.create_task_group() as closers:
                for _ in range(3):
                    closers.start_soon(engine.aclose)
            with pytest.raises(EngineClosed):
                await read(stream)
        assert sorted(ended) == [0, 1, 2, 3]
        await engine.aclose()
        stats = engine.stats()
        assert (stats.kv_blocks_used, stats.requests_running, stats.requests_waiting) == (0, 0, 0)
        for call in (engine.generate([5]), read(engine.stream([5])), engine.open(), engine.chat([])):
            with pytest.raises(EngineClosed):
                await call

    anyio.run(main, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_closing_does_not_wait_for_a_stuck_step(tiny: Path, backend: str) -> None:
    """Closing while a step is stuck returns after shutdown_s, with the request ended
    (hw-native-sys/pypto-lib#274)."""

    async def main() -> None:
        engine = Engine(tiny, EngineConfig(shutdown_s=0.05, **SMALL))
        await engine.open()
        with gated(engine) as gate:
            thread = engine.face.loop._thread
            async with anyio.create_task_group() as group:

                async def pending() -> None:
                    with pytest.raises(EngineClosed):
                        await engine.generate([5], max_tokens=4, **GREEDY)

                group.start_soon(pending)
                await anyio.to_thread.run_sync(gate.wait_step)
                await engine.aclose()
                await engine.aclose()
            assert thread is not None
            assert thread.is_alive()
            gate.open()
            await anyio.to_thread.run_sync(thread.join)

    anyio.run(main, backend=backend)


def test_an_engine_that_was_never_opened_closes(tiny: Path) -> None:
    """Closing before opening is allowed, and opening afterwards is refused (hw-native-sys/pypto-lib#274)."""
    engine = Engine(tiny)
    anyio.run(engine.aclose)
    with pytest.raises(EngineClosed):
        anyio.run(engine.open)
    plain = SyncEngine(tiny)
    with pytest.raises(EngineClosed, match="not open"):
        plain.stats()
    plain.close()


def test_a_model_that_cannot_be_opened(tmp_path: Path, tiny: Path) -> None:
    """What cannot be opened says so at every call, and the engine still closes (hw-native-sys/pypto-lib#274)."""
    engine = Engine(tmp_path)
    for _ in range(2):
        with pytest.raises(ModelLoadError):
            anyio.run(engine.generate, "x")
    anyio.run(engine.aclose)
    with pytest.raises(ConfigError):
        Engine(tiny, {"threads": 1})  # type: ignore[arg-type]


def test_opening_once_from_many_tasks(tiny: Path) -> None:
    """Many first calls at once load the model once; a cancelled one leaves it to the others
    (vllm-project/vllm#17208)."""

    async def main() -> None:
        engine = Engine(tiny, EngineConfig(**SMALL))
        with anyio.move_on_after(0):
            await engine.open()
        async with anyio.create_task_group() as group:
            for at in range(6):
                group.start_soon(lambda at=at: engine.generate([5 + at], max_tokens=2, **GREEDY))
        names = [thread.name for thread in threading.enumerate()]
        assert names.count("kimicore-engine") - known <= 1
        await engine.aclose()

    known = [thread.name for thread in threading.enumerate()].count("kimicore-engine")
    anyio.run(main)


def test_rounds_of_opening_and_closing_leave_nothing(script: Engine, tmp_path: Path) -> None:
    """Ten engines one after another leave no thread, no open file and no memory behind (vllm-project/vllm#21073)."""
    folder = script.face._model
    model_bytes = 49_152 * 64 * 4 * 2

    def measure() -> tuple[int, int, int]:
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        threads = [thread.name for thread in threading.enumerate()].count("kimicore-engine")
        return threads, len(os.listdir("/proc/self/fd")), resident

    seen = []
    for _ in range(10):
        with SyncEngine(folder, EngineConfig(**SMALL)) as engine:
            assert engine.generate([START], max_tokens=15, **GREEDY).text == "漏斗图잠깐만"
        del engine
        seen.append(measure())
    assert {one[:2] for one in seen[2:]} == {seen[1][:2]}
    resident = [one[2] for one in seen]  # now and then the allocator gives back late, so the least of several counts
    assert min(resident[6:]) - min(resident[1:5]) < model_bytes // 2


def test_two_engines_side_by_side(shared: Engine, script: Engine, alone: Alone) -> None:
    """Two engines with different models work in one process at the same time (vllm-project/vllm#21073)."""
    expected = alone([5, 6], max_tokens=30, **GREEDY).text

    async def main() -> None:
        texts: list[tuple[str, str]] = []

        async def both() -> None:
            a: list[str] = []
            async with anyio.create_task_group() as group:

                async def one(engine: Engine, prompt: list[int], tokens: int) -> None:
                    a.append((await engine.generate(prompt, max_tokens=tokens, **GREEDY)).text)

                group.start_soon(one, shared, [5, 6], 30)
                group.start_soon(one, script, [START], 15)
            texts.append((min(a), max(a)))

        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(both)
        assert texts == [(min(expected, "漏斗图잠깐만"), max(expected, "漏斗图잠깐만"))] * 5
        await settled(shared)
        await settled(script)

    anyio.run(main)


def test_a_setting_of_the_process_is_put_back(tiny: Path) -> None:
    """torch's thread count is set while an engine with threads= is open, and put back when it closes
    (vllm-project/vllm#21073)."""
    import torch

    before = torch.get_num_threads()
    with SyncEngine(tiny, EngineConfig(threads=2, **SMALL)) as engine:
        engine.generate([5], max_tokens=1)
    assert torch.get_num_threads() == before


# ---------------------------------------------------------------- processes


def _script(body: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", textwrap.dedent(body), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


UNCLOSED = """
    import sys
    import anyio
    import kimicore

    kept = []

    async def main():
        engine = kimicore.Engine(sys.argv[1], kimicore.EngineConfig(dtype="float32", kv_device_bytes="1MiB"))
        result = await engine.generate([5], max_tokens=3, ignore_eos=True)
        stream = engine.stream([5], max_tokens=None, ignore_eos=True)
        await anext(stream)
        kept.extend([engine, stream])
        runner = engine.face.loop.runner
        run = runner.run

        def slow(step):  # if the process waited for this request to end, it would take an hour
            import time
            time.sleep(1.0)
            return run(step)

        runner.run = slow
        print(len(result.token_ids), flush=True)

    anyio.run(main, backend=sys.argv[2])
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_script_that_closes_nothing_ends(tiny: Path, backend: str) -> None:
    """A script that leaves its engine open, with a stream in mid-text, exits by itself with code 0
    (vllm-project/vllm#3996)."""
    done = _script(UNCLOSED, tiny, backend)
    assert (done.returncode, done.stdout.strip()) == (0, "3"), done.stderr
    assert "Traceback" not in done.stderr


FORKED = """
    import os
    import sys
    import warnings
    import kimicore

    warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads: that is what is tried here
    settings = kimicore.EngineConfig(dtype="float32", kv_device_bytes="1MiB")
    with kimicore.SyncEngine(sys.argv[1], settings) as engine:
        before = engine.generate([5], max_tokens=8, temperature=0.0).text
        child = os.fork()
        if not child:
            code = 1
            try:
                engine.generate([5], max_tokens=8)
            except kimicore.ForkedProcess as error:
                code = 0 if "spawn" in str(error) else 2
            try:
                kimicore.SyncEngine(sys.argv[1], settings).open()
                code = 3
            except kimicore.ForkedProcess as error:
                code = code or (0 if "spawn" in str(error) else 4)
            engine.close()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0, status
        assert engine.generate([5], max_tokens=8, temperature=0.0).text == before
    print("both went on")
"""


def test_a_fork_is_refused_in_the_child_only(tiny: Path) -> None:
    """In a forked child the engine says what to do, and the parent's goes on (vllm-project/vllm#8893)."""
    done = _script(FORKED, tiny)
    assert (done.returncode, done.stdout.strip()) == (0, "both went on"), done.stderr


def test_importing_loads_no_device_library(tiny: Path) -> None:
    """Importing the package imports neither torch nor anything of an extra, so that a child may be forked first and
    make its own engine (vllm-project/vllm#8893)."""
    body = """
        import os, sys
        import kimicore
        assert not {"torch", "trio", "transformers", "huggingface_hub", "triton"} & set(sys.modules)
        child = os.fork()
        if not child:
            with kimicore.SyncEngine(sys.argv[1], kimicore.EngineConfig(kv_device_bytes="1MiB")) as engine:
                os._exit(0 if engine.generate([5], max_tokens=2, ignore_eos=True).token_ids else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """
    done = _script(body, tiny)
    assert done.returncode == 0, done.stderr
