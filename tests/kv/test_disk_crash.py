"""After a crash at any moment: no start is refused, no block is wrong, and what was durable is found."""

from __future__ import annotations

import os
import random
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kimicore.kv.disk import DiskStore
from kimicore.kv.record import HEADER_BYTES

from .recorded import RecordingFiles, crashes
from .rig import LIMIT, Clock, FaultyFiles, folder_bytes, found, key, numbers, opened, put, segments

Make = Callable[..., DiskStore]
NUMBERS = 90


class Recorded(RecordingFiles, FaultyFiles):
    """Calls that are noted where they succeed, and can fail."""

    def __init__(self) -> None:
        FaultyFiles.__init__(self)
        RecordingFiles.__init__(self)


def busy_run(folder: Path, files: Recorded, seed: int) -> None:
    """Put, discard, compact, restart, run into full disks and bad blocks, and note what is durable."""
    rng = random.Random(seed)
    clock = Clock()
    store = opened(folder, files=files, direct="off", clock=clock)
    for turn in range(220):
        some = [rng.randrange(NUMBERS) for _ in range(rng.randint(1, 6))]
        if turn % 40 == 20:
            files.room = rng.randrange(40_000)
        sizes = put(store, some)
        files.note("published", [number for number, size in zip(some, sizes, strict=True) if size])
        if files.room is not None:
            files.room = None
            clock.now += 60
        elif not all(sizes):
            leaving = rng.sample(numbers(store), 6)
            files.note("discarded", leaving)
            store.discard(map(key, leaving))
        if turn % 25 == 24:
            store.compact()
        if turn % 31 == 30:
            bad = rng.choice(numbers(store))
            with store._log.reading(key(bad)) as place:
                assert place is not None
                path = folder / place.segment.name
                with path.open("r+b") as file:
                    file.seek(place.record.offset + HEADER_BYTES)
                    file.write(b"bad")
            files.note("discarded", [bad])
            assert not found(store, bad)
        if turn % 50 == 49:
            store.close()
            store = opened(folder, files=files, direct="off", clock=clock)
    store.close()


def go_on(folder: Path, certain: set[int], rng: random.Random) -> None:
    """Work on after a crash, having read nothing yet, and look for the blocks then and after a restart."""
    store = opened(folder, direct="off")
    for _ in range(rng.randrange(4)):
        put(store, [500 + rng.randrange(20)])
    leaving = {number for number in range(NUMBERS) if rng.random() < 0.2}
    store.discard(map(key, leaving))
    if rng.random() < 0.7:
        store.compact()
    if rng.random() < 0.5:
        assert all(found(store, number) for number in certain - leaving)
    assert folder_bytes(folder) <= LIMIT
    store.close()
    store = opened(folder, direct="off")
    hits = {number for number in range(NUMBERS) if found(store, number)}
    assert certain - leaving <= hits, f"lost {sorted(certain - leaving - hits)}"
    store.close()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "points", [pytest.param(300, id="some"), pytest.param(10_000, id="all", marks=pytest.mark.long)]
)
def test_a_crash_at_any_write(folder: Path, tmp_path: Path, points: int) -> None:
    """Rebuilt from any beginning of the recorded writes, with writes that were not synced lost, torn by pages or in
    another order, the folder opens, every block is right or a miss, and what was published and durable is found.
    """
    found_certain = found_more = 0
    for seed in range(points // 300 + 1):
        files = Recorded()
        if folder.exists():
            shutil.rmtree(folder)
        busy_run(folder, files, seed)
        assert files.most_bytes <= LIMIT
        assert sum(one.kind == "remove" for one in files.log) > 10
        for at, certain, point in crashes(files.log, min(300, points - 300 * seed), tmp_path, seed):
            if point % 3 == 0:
                go_on(at, certain, random.Random(point))
            else:
                store = opened(at, direct="off")
                hits = {number for number in range(NUMBERS) if found(store, number)}
                assert certain <= hits, f"seed {seed}, operation {point}: lost {sorted(certain - hits)}"
                found_certain += len(certain)
                found_more += len(hits - certain)
                store.close()
            shutil.rmtree(at)
    print(f"{points} crashes: {found_certain} blocks that had to be there, and {found_more} more")
    assert found_certain > 10 * points


def test_a_store_that_publishes_too_early_is_caught(folder: Path, tmp_path: Path) -> None:
    """The replay sees a store that does not wait for the disk, so that it would see ours."""

    class Hasty(Recorded):
        def sync(self, fd: int) -> None:
            pass

    files = Hasty()
    busy_run(folder, files, 0)
    lost = 0
    for at, certain, _ in crashes(files.log, 60, tmp_path, 0):
        store = opened(at, direct="off")
        lost += len(certain - {number for number in range(NUMBERS) if found(store, number)})
        store.close()
    assert lost > 0


WRITER = """
import os, random, sys
sys.path.insert(0, sys.argv[3])
from kv.rig import numbers, opened, put, key
from pathlib import Path
rng = random.Random(int(sys.argv[2]))
store = opened(Path(sys.argv[1]))
say = lambda what, some: os.write(1, f"{what} {' '.join(map(str, some))}\\n".encode())
say("open", [])
while True:
    some = [rng.randrange(90) for _ in range(rng.randint(1, 5))]
    sizes = put(store, some)
    say("published", [n for n, size in zip(some, sizes) if size])
    if not all(sizes):
        leaving = rng.sample(numbers(store), 6)
        say("discarded", leaving)
        store.discard(map(key, leaving))
    if rng.random() < 0.05:
        store.compact()
"""


def killed(folder: Path, rng: random.Random, seed: int) -> list[str]:
    """Run a writer, kill it at a random moment, and return the whole lines that it said."""
    tests = str(Path(__file__).parent.parent)
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), str(seed), tests], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with writer:
        assert writer.stdout is not None and writer.stderr is not None
        said = b""
        while b"open" not in said:  # a start may take a while, and is a good moment too, now and then
            ready, _, _ = select.select([writer.stdout], [], [], 60)
            chunk = os.read(writer.stdout.fileno(), 1 << 16) if ready else b""
            assert chunk, writer.stderr.read().decode()
            said += chunk
        time.sleep(rng.choice((0.0, 0.02, 0.1, 0.2)) * rng.random())
        writer.kill()
        said += writer.stdout.read()
        assert writer.wait() == -9, writer.stderr.read().decode()
    return said.decode().splitlines(keepends=True)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kills", [pytest.param(20, id="some"), pytest.param(500, id="all", marks=pytest.mark.long)])
def test_a_writer_that_is_killed(folder: Path, kills: int) -> None:
    """A process that is killed while it writes leaves a folder that opens at once, with all that it had published."""
    rng = random.Random(7)
    certain: set[int] = set()
    checked = 0
    for seed in range(kills):
        for line in killed(folder, rng, seed):
            what, *rest = line.split()
            if what == "published" and line.endswith("\n"):
                certain |= set(map(int, rest))
            elif what == "discarded":
                certain -= set(map(int, rest))
        assert folder_bytes(folder) <= LIMIT
        store = opened(folder)
        hits = {number for number in range(NUMBERS) if found(store, number)}
        assert certain <= hits, f"kill {seed}: lost {sorted(certain - hits)}"
        assert (store.stats().set_aside, store.stats().read_failures) == (0, 0)
        checked += len(hits)
        store.close()
    print(f"{kills} kills: {checked} blocks were found")
    assert checked > 10 * kills
    assert segments(folder)
