"""An engine under mixed traffic for an hour: does its memory stay where it is? One JSON line every minute.

    python benchmarks/soak.py [--minutes 60] [--clients 12] [--folder /tmp]

Clients ask again and again, in turns of conversations that grow: prompts of 20 to 1,500 tokens, 1 to 48 new ones, in
all precisions of the KV, with and without sparse decoding; one in eight is cancelled, one in sixteen has a timeout
that it will hardly keep, one in eight reads its stream slowly. All three tiers are small, so that blocks go down and
come back all the time. What is measured: the process's anonymous memory (less the arenas, which are counted whole
from the start), open files, threads, what the folder takes of the disk, and the engine's own figures. The last line
compares the second half of the time with the first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import anyio

import kimicore
from engine import TEXT, machine

MIB = 1 << 20
PRECISIONS = ("full", "full", "int8", "int4")


def anonymous_bytes() -> int:
    """Return the anonymous memory that this process has in use."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this system does not tell anonymous memory")


def folder_bytes(folder: Path) -> int:
    """Return what the folder's files take of the disk."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512
    return total


class Client:
    """Asks until it is told to stop; a conversation ends after some turns, or when it is long."""

    def __init__(self, engine: kimicore.Engine, text: list[int], seed: int) -> None:
        self.engine, self.text = engine, text
        self.chance = random.Random(seed)
        self.outcomes: dict[str, int] = {}

    async def run(self) -> None:
        """Hold conversations for ever."""
        while True:
            chance = self.chance
            ids = self.text[chance.randrange(len(self.text) - 200) :][: chance.randrange(20, 200)]
            kv: dict[str, Any] = {"kv_precision": chance.choice(PRECISIONS), "tenant": chance.choice(["", "a"])}
            if kv["kv_precision"] == "full" and chance.random() < 0.25:
                kv["sparse_decode"] = 0.5
            for _ in range(chance.randrange(1, 6)):
                ids = [*ids, *await self.turn(ids, kv)]
                ids += self.text[chance.randrange(len(self.text) - 400) :][: chance.randrange(10, 300)]
                if len(ids) > 1500:
                    break

    async def turn(self, ids: list[int], kv: dict[str, Any]) -> tuple[int, ...]:
        """Ask once, in one of several manners, and note how it ended."""
        chance = self.chance
        how = chance.choices(["plain", "cancelled", "slow", "late"], [11, 2, 2, 1])[0]
        options = {**kv, "max_tokens": chance.randrange(1, 48), "ignore_eos": True, "temperature": 0.0}
        tokens: tuple[int, ...] = ()
        try:
            if how == "slow":
                async with self.engine.stream(ids, **options) as stream:
                    async for chunk in stream:
                        tokens += chunk.token_ids
                        await anyio.sleep(0.05)
            else:
                options["timeout_s"] = 0.2 if how == "late" else None
                with anyio.move_on_after(chance.random() if how == "cancelled" else 1e9) as scope:
                    tokens = (await self.engine.generate(ids, **options)).token_ids
                how = "cancelled" if scope.cancelled_caught else "done"
        except kimicore.RequestTimeout:
            how = "late"
        self.outcomes[how] = self.outcomes.get(how, 0) + 1
        return tokens


async def soak(options: argparse.Namespace, folder: Path) -> None:
    """Run the traffic and print what is measured."""
    config = kimicore.EngineConfig(
        dtype=options.dtype,
        threads=options.threads,
        kv_device_bytes="96MiB",
        kv_host_bytes="96MiB",
        kv_disk_dir=folder / "kv",
        kv_disk_bytes="256MiB",
        kv_disk_uses=1,
        kv_precisions=("int8", "int4"),
        sparse_decode=True,
    )
    async with kimicore.Engine(options.model, config) as engine, anyio.create_task_group() as group:
        text = list(engine.face.tokenizer.encode(TEXT.read_text()))
        clients = [Client(engine, text, seed) for seed in range(options.clients)]
        for client in clients:
            group.start_soon(client.run)
        samples: list[dict[str, Any]] = []
        lived_s, last_s, told = 0.0, time.monotonic(), 0
        while lived_s < 60 * options.minutes:
            await anyio.sleep(5.0)
            now_s = time.monotonic()
            lived_s, last_s = lived_s + min(now_s - last_s, 10.0), now_s  # a process that was stopped has not lived
            samples.append(sample(engine, folder / "kv"))
            if lived_s >= 60 * (told + 1):
                told += 1
                print(json.dumps({"minute": told, **samples[-1]}), flush=True)
        group.cancel_scope.cancel()
    outcomes: dict[str, int] = {}
    for client in clients:
        for how, count in client.outcomes.items():
            outcomes[how] = outcomes.get(how, 0) + count
    first, second = samples[len(samples) // 10 : len(samples) // 2], samples[len(samples) // 2 :]
    row: dict[str, Any] = {"case": "soak", "minutes": options.minutes, **outcomes}
    for name in ("anonymous_mib", "open_files", "threads", "folder_mib"):
        row[f"{name}_first"] = max(one[name] for one in first)
        row[f"{name}_second"] = max(one[name] for one in second)
    print(json.dumps(row), flush=True)


def sample(engine: kimicore.Engine, folder: Path) -> dict[str, Any]:
    """Return what is measured now."""
    stats = engine.stats()
    assert stats.host is not None
    assert stats.disk is not None
    if stats.requests_failed:
        raise RuntimeError(f"{stats.requests_failed} requests have failed")
    return {
        "anonymous_mib": round(anonymous_bytes() / MIB),
        "open_files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "folder_mib": round(folder_bytes(folder) / MIB),
        "host_mib": round(stats.host.used_bytes / MIB),
        "finished": stats.requests_finished,
        "preemptions": stats.preemptions,
        "loads": stats.loads,
        "loads_late": stats.loads_late,
        "set_aside": stats.disk.set_aside,
    }


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--folder", type=Path, default=None, help="where the disk tier lies (default: the system's)")
    options = parser.parse_args()
    print(json.dumps(machine()), flush=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        anyio.run(soak, options, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
