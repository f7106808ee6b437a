"""The team of threads runs a job on as many threads as asked, once each, for any caller, and after a fork."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from kimicore.kernels.team.native import parallel_entry

JOB = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
Entry = Callable[[Callable[[], object], int], None]


@pytest.fixture(scope="module")
def entry() -> Entry:
    """Return ``run(body, threads)``."""
    address = parallel_entry()
    if address is None:
        pytest.skip("no C++ compiler")
    call = ctypes.CFUNCTYPE(None, JOB, ctypes.c_void_p, ctypes.c_uint)(address)

    def run(body: Callable[[], object], threads: int) -> None:
        call(JOB(lambda _: body()), None, threads)

    return run


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_each_thread_runs_the_job_once(entry: Entry, threads: int) -> None:
    """As many as asked, all at once, the caller among them; and again after helpers have gone to sleep."""
    for pause_s in (0.0, 0.0, 0.01):
        time.sleep(pause_s)
        seen: list[int] = []
        meeting = threading.Barrier(threads)

        def body(seen: list[int] = seen, meeting: threading.Barrier = meeting) -> None:
            meeting.wait(10.0)  # nobody gets by before all are there
            seen.append(threading.get_native_id())

        entry(body, threads)
        assert len(set(seen)) == len(seen) == threads
        assert threading.get_native_id() in seen


def test_sizes_may_alternate(entry: Entry) -> None:
    """A helper that is not asked takes no part, and does not miss its next turn."""
    for threads in [4, 1, 2, 4, 3, 2, 4] * 30:
        seen: list[int] = []
        entry(lambda seen=seen: seen.append(1), threads)
        assert len(seen) == threads


def test_callers_do_not_meet(entry: Entry) -> None:
    """Each calling thread has helpers of its own, which end with it."""
    before = _threads()

    def caller(number: int) -> int:
        total: list[int] = []
        for _ in range(200):
            entry(lambda: total.append(number), 3)
        return total.count(number)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(caller, range(4))) == [600] * 4
    deadline = time.monotonic() + 10.0
    while _threads() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _threads() <= before


def _threads() -> int:
    return len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else threading.active_count()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_gets_its_own(entry: Entry) -> None:
    """In a child of a process with helpers, which do not come along, the team works and the child ends."""
    program = (
        "import os, sys\n"
        f"sys.path[:0] = {sys.path!r}\n"
        "from kimicore.kernels.team.native import parallel_entry\n"
        "import ctypes\n"
        "JOB = ctypes.CFUNCTYPE(None, ctypes.c_void_p)\n"
        "call = ctypes.CFUNCTYPE(None, JOB, ctypes.c_void_p, ctypes.c_uint)(parallel_entry())\n"
        "seen = []\n"
        "job = JOB(lambda _: seen.append(1))\n"
        "call(job, None, 3)\n"
        "child = os.fork()\n"
        "call(job, None, 2)\n"
        "if child:\n"
        "    print(len(seen), os.waitpid(child, 0)[1])\n"
        "else:\n"
        "    sys.exit(0 if len(seen) == 5 else 3)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["5", "0"]
