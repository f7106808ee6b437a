"""Contexts that come back from host memory and from disk, beside computing them again: one JSON line per row.

    python benchmarks/kv_tiers.py [--model smollm2-135m-instruct] [--cases resume,choice,...] [--folder DIR]

Everything of a case is measured in one run on one machine. ``resume``: a context of 2,000 and of 7,000 tokens goes on
after it left the device: seconds to the first token from host memory, from disk (read past the page cache where the
file system allows it) and computed anew, medians of ``--repeat``; and the limits that bound them: a copy of as many
bytes, a direct read of the same records, and their decoding alone, from memory, by as many threads as decode them in a
load (``disk_of_bound`` is the load's share of the smaller of these two). ``choice``: contexts of 64 to 7,000 tokens,
loaded and computed, and what the engine chooses by itself. ``sessions``: sessions of 2,000 tokens, kept at 1, 4 and 10
times the arena, each resumed in a random order: first-token times, beside an engine that can only compute.
``importance``: a load of many conversations over a small arena, under eviction that hears of attention, that does not,
and by age.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import numpy as np

import kimicore
from engine import TEXT, machine
from kimicore.rates import Rates

GREEDY: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}


class Fixed(Rates):
    """A tier whose loads are said to take no time, or for ever, so that a case can force the choice."""

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__(bytes_per_s, 0.0)

    def observe(self, load_bytes: int, seconds: float) -> None:
        """Learn nothing."""


class Bench:
    """One engine with its tiers, and texts for it."""

    def __init__(self, options: argparse.Namespace, folder: Path | None, **settings: Any) -> None:
        self.options = options
        disk = {} if folder is None else {"kv_disk_dir": folder, "kv_disk_bytes": "4GiB", "kv_disk_uses": 1}
        self.engine = kimicore.Engine(
            options.model, kimicore.EngineConfig(dtype=options.dtype, threads=options.threads, **disk, **settings)
        )

    async def __aenter__(self) -> Bench:
        await self.engine.open()
        loop = self.engine.face.loop
        self.book, self.tokenizer = loop._book, loop.tokenizer
        self.text = self.tokenizer.encode(TEXT.read_text())
        self.block_bytes = self.book.ledger.classes[0].block_bytes
        await self.ask(self.text[:600])
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.engine.aclose()

    @property
    def tiers(self) -> Any:
        """The lower tiers."""
        return self.book.below.tiers

    def context(self, number: int, tokens: int) -> list[int]:
        """Return a context that shares no block with another one."""
        start = 997 * number % len(self.text)
        turned = self.text[start:] + self.text[:start]
        return [100 + number, *(turned * (1 + tokens // len(turned)))[: tokens - 1]]

    def force(self, tier: str | None) -> None:
        """Have loads from ``tier`` be taken, and no others; None: no loads at all."""
        self.tiers.rates = {name: Fixed(1e18 if name == tier else 1e-3) for name in ("host", "disk")}

    async def ask(self, ids: Sequence[int]) -> Any:
        """Return the result of a request for one token."""
        return await self.engine.generate(ids, **GREEDY)

    async def rest(self) -> None:
        """Wait until no block is on its way."""
        while self.tiers.busy:
            await self.ask(self.text[:8])
            await anyio.sleep(0.002)

    async def push_out(self) -> None:
        """Have the cached blocks leave the idle device for where their copies are."""
        await self.rest()
        self.book.ledger.flush()
        await self.ask(self.text[:8])

    async def to_disk(self, ids: Sequence[int]) -> None:
        """Have a context on disk and nowhere else."""
        from kimicore.handle import SinkCall
        from kimicore.wake import AsyncWaker

        call = SinkCall(ids, len(ids), "", "full", AsyncWaker())
        self.engine.face.loop.sink(call)
        while not call.done:
            await anyio.sleep(0.01)
        assert call.stored == call.blocks, (call.stored, call.blocks)


def rate(function: Callable[[], Any], size_bytes: int, times: int = 5) -> float:
    """Return the median of bytes per second."""
    seconds = []
    for _ in range(times):
        begun = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - begun)
    return size_bytes / statistics.median(seconds)


async def resume(options: argparse.Namespace, folder: Path) -> None:
    """Case ``resume``."""
    for tokens in options.tokens:
        need = 2 * (tokens // 16 + 64)
        async with Bench(options, folder, kv_device_bytes=need * 800_000, kv_host_bytes=need * 800_000) as bench:
            row: dict[str, Any] = {"case": "resume", "tokens": tokens}
            times: dict[str, list[float]] = {"computed": [], "host": [], "disk": []}
            waits: dict[str, list[float]] = {"host": [], "disk": []}
            for turn in range(options.repeat):
                ids = bench.context(turn, tokens)
                bench.force(None)
                times["computed"].append((await bench.ask(ids)).timing.ttft_s)
                await bench.to_disk(ids)
                for tier in ("host", "disk"):
                    await bench.push_out()
                    if tier == "disk":
                        drop_host(bench)
                    bench.force(tier)
                    result = await bench.ask(ids)
                    assert result.usage.cached_tokens >= tokens - 17, (tier, result.usage)
                    times[tier].append(result.timing.ttft_s)
                    waits[tier].append(result.timing.queue_s)
            row |= {f"{name}_ttft_s": round(statistics.median(one), 4) for name, one in times.items()}
            row |= {f"{name}_load_s": round(statistics.median(one), 4) for name, one in waits.items()}
            row |= limits(bench, tokens, folder, row)
            print(json.dumps(row), flush=True)
        shutil.rmtree(folder, ignore_errors=True)


def drop_host(bench: Bench) -> None:
    """Forget what the host has, while nothing moves."""
    host = bench.tiers.host
    for kind, slots in enumerate(host.slots):
        for key in list(slots):
            host.drop(kind, key)


def limits(bench: Bench, tokens: int, folder: Path, row: dict[str, Any]) -> dict[str, Any]:
    """Return the physical limits of a load of so many tokens, and which share of them was had."""
    size = tokens // 16 * bench.block_bytes
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    copy = rate(lambda: np.copyto(target, source), size)
    store = bench.engine.face.loop._moves._carrier.disk
    entries = store.entries()[-(tokens // 16) :]
    stored = sum(one.stored_bytes for one in entries)
    out = memoryview(bytearray(bench.block_bytes))
    before = store.stats().read_bytes
    whole = rate(lambda: [store.get(one.key, one.layout, out) for one in entries], size, 3)
    read_bytes = (store.stats().read_bytes - before) / 3
    read = direct_read_rate(folder, int(read_bytes))
    read_as_raw = read * size / stored
    decode = decode_rate(store, [one.key for one in entries], kimicore.EngineConfig().io_threads)
    disk = size / row["disk_load_s"]
    return {
        "bytes": size,
        "stored_bytes": stored,
        "direct": store.stats().direct,
        "copy_mb_s": round(copy / 1e6),
        "host_mb_s": round(size / row["host_load_s"] / 1e6),
        "host_of_copy": round(size / row["host_load_s"] / copy, 2),
        "read_mb_s": round(read / 1e6),
        "read_as_raw_mb_s": round(read_as_raw / 1e6),
        "decode_mb_s": round(decode / 1e6),
        "store_one_thread_mb_s": round(whole / 1e6),
        "disk_mb_s": round(disk / 1e6),
        "disk_of_read": round(disk / read_as_raw, 2),
        "disk_of_bound": round(disk / min(read_as_raw, decode), 2),
        "prefill_tokens_per_s": round(tokens / row["computed_ttft_s"]),
        "host_factor": round(row["computed_ttft_s"] / row["host_ttft_s"], 1),
        "disk_factor": round(row["computed_ttft_s"] / row["disk_ttft_s"], 1),
    }


def decode_rate(store: Any, keys: Sequence[bytes], threads: int) -> float:
    """Return bytes per second, raw, of these records' payloads decoded from memory by so many threads, nothing else."""
    places = [store._log.index[key] for key in keys]
    payloads = [bytes(one.segment.read(one.record, store._buffers)) for one in places]
    records = [one.record for one in places]
    ends = np.cumsum([one.raw_bytes for one in records])
    target = np.zeros(ends[-1], np.uint8)

    def part(number: int) -> None:
        for at in range(number, len(records), threads):
            one = records[at]
            room = target[ends[at] - one.raw_bytes : ends[at]]
            store._codec.decode(one.codec, payloads[at], room.data, one.item_bytes)

    with ThreadPoolExecutor(threads) as pool:
        return rate(lambda: list(pool.map(part, range(threads))), int(ends[-1]))


def direct_read_rate(folder: Path, size_bytes: int) -> float:
    """Return bytes per second of plain reads of 1 MiB past the page cache, one after the other."""
    import mmap
    import os

    path = max(folder.glob("segment-*"), key=lambda one: one.stat().st_size)
    room = mmap.mmap(-1, 1 << 20)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    pages = path.stat().st_size >> 20
    begun, done = time.perf_counter(), 0
    while done < min(size_bytes, 256 << 20):
        done += os.preadv(fd, [room], (done >> 20) % pages << 20)
    seconds = time.perf_counter() - begun
    os.close(fd)
    return done / seconds


async def choice(options: argparse.Namespace, folder: Path) -> None:
    """Case ``choice``."""
    lengths = [64, 128, 256, 512, 1_024, 2_048, 4_096, 7_000]
    need = 2 * (7_000 // 16 + 64)
    async with Bench(options, folder, kv_device_bytes=need * 800_000, kv_host_bytes=need * 800_000) as bench:
        for tier in ("host", "disk"):
            learnt = None
            for tokens in lengths:
                times: dict[str, list[float]] = {"computed": [], "loaded": [], "chosen": []}
                picked = 0
                for turn in range(options.repeat):
                    ids = bench.context(10 + turn, tokens)
                    bench.force(None)
                    await bench.push_out()
                    times["computed"].append((await bench.ask(ids)).timing.ttft_s)
                    await bench.to_disk(ids)
                    for name in ("loaded", "chosen"):
                        await bench.push_out()
                        if tier == "disk":
                            drop_host(bench)
                        if name == "loaded":
                            bench.force(tier)
                        else:
                            bench.tiers.rates = learnt or {"host": Rates(4e9, 1e-3), "disk": Rates(0.5e9, 2e-3)}
                            learnt = bench.tiers.rates
                        result = await bench.ask(ids)
                        times[name].append(result.timing.ttft_s)
                        picked += name == "chosen" and result.usage.cached_tokens > 0
                middle = {name: statistics.median(one) for name, one in times.items()}
                row = {"case": "choice", "tier": tier, "tokens": tokens}
                row |= {f"{name}_ttft_s": round(one, 4) for name, one in middle.items()}
                row |= {
                    "chose_load": f"{picked}/{options.repeat}",
                    "over_best": round(middle["chosen"] / min(middle["computed"], middle["loaded"]), 2),
                }
                print(json.dumps(row), flush=True)
    shutil.rmtree(folder, ignore_errors=True)


async def sessions(options: argparse.Namespace, folder: Path) -> None:
    """Case ``sessions``."""
    async with Bench(options, None, kv_host_bytes="64MiB") as bench:
        options.block_bytes = bench.block_bytes
    tokens, per = 2_000, 2_000 // 16 + 2
    arena = 4 * per
    for factor in (1, 4, 10):
        count = max(3, int(factor * arena / per))
        for below in ("none", "host", "disk"):
            async with Bench(
                options, None if below != "disk" else folder, **sized(options, arena, factor, below)
            ) as one:
                texts = [one.context(number, tokens) for number in range(count)]
                for text in texts:
                    await one.ask(text)
                order = random.Random(1).sample(range(count), count)
                first = []
                for number in order:
                    result = await one.ask([*texts[number], 77])
                    first.append((result.timing.ttft_s, result.usage.cached_tokens))
                times = sorted(seconds for seconds, _ in first)
                row = {
                    "case": "sessions",
                    "below": below,
                    "of_arena": factor,
                    "sessions": count,
                    "p50_s": round(times[len(times) // 2], 4),
                    "p99_s": round(times[min(len(times) - 1, int(0.99 * len(times)))], 4),
                    "hit_share": round(sum(hit for _, hit in first) / (count * tokens), 3),
                }
                print(json.dumps(row), flush=True)
            shutil.rmtree(folder, ignore_errors=True)


async def importance(options: argparse.Namespace, folder: Path) -> None:
    """Case ``importance``."""
    quick = {"policy": {"eviction": {"half_life_s": 10.0, "learn_half_life_s": 20.0}}}  # as the load is: half a minute
    activity: dict[str, Any] = {"eviction": "activity-importance"}
    for name, settings in {
        "lru": {"eviction": "lru"},
        "activity, flat": activity,
        "activity, attention": {**activity, "importance": "attention"},
        "activity, flat, half-life 10 s": {**activity, **quick},
        "activity, attention, half-life 10 s": {**activity, **quick, "importance": "attention"},
    }.items():
        first: list[float] = []
        hit = asked = 0
        for seed in range(3, 3 + options.repeat):
            async with Bench(options, None, kv_device_bytes="96MiB", **settings) as bench:
                times, found, wanted = await converse(bench, multi_turn(random.Random(seed), sessions=24, turns=5))
            first, hit, asked = first + times, hit + found, asked + wanted
        first.sort()
        row = {"case": "importance", "eviction": name, "requests": len(first), "hit_share": round(hit / asked, 3)}
        row |= {"ttft_p50_s": round(first[len(first) // 2], 4), "ttft_mean_s": round(statistics.mean(first), 4)}
        print(json.dumps(row), flush=True)


async def converse(bench: Bench, plan: Sequence[tuple[int, int]]) -> tuple[list[float], int, int]:
    """Hold these conversations one turn after another; return first-token times, and tokens cached and asked for."""
    histories: dict[int, list[int]] = {}
    first: list[float] = []
    hit = asked = 0
    for session, more in plan:
        ids = histories.setdefault(session, bench.context(session, 120))
        ids += bench.text[(911 * len(ids) + 37 * session) % 20_000 :][:more]
        result = await bench.engine.generate(ids, max_tokens=16, temperature=0.0, ignore_eos=True)
        ids += result.token_ids
        first.append(result.timing.ttft_s)
        hit, asked = hit + result.usage.cached_tokens, asked + result.usage.prompt_tokens
    return first, hit, asked


def multi_turn(chance: random.Random, sessions: int, turns: int) -> list[tuple[int, int]]:
    """Return who asks next and how many tokens are new: few sessions go on often, most end early."""
    left = {one: 1 + min(turns - 1, int(chance.expovariate(0.5))) for one in range(sessions)}
    plan: list[tuple[int, int]] = []
    while left:
        alive = sorted(left)
        session = chance.choice(alive[:8])  # those that came first go on first, as visitors do
        plan.append((session, chance.choice([40, 120, 300])))
        left[session] -= 1
        if not left[session]:
            del left[session]
    return plan


def sized(options: argparse.Namespace, arena: int, factor: int, below: str) -> dict[str, Any]:
    """Return the sizes of the tiers, for blocks of the model's size."""
    block = options.block_bytes
    host = {"kv_host_bytes": int((factor + 1) * arena * block)} if below == "host" else {}
    return {"kv_device_bytes": (arena + 1) * block, **host}


CASES = {"resume": resume, "choice": choice, "sessions": sessions, "importance": importance}


def main() -> None:
    """Run the cases that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--tokens", type=lambda text: [int(one) for one in text.split(",")], default=[2_000, 7_000])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--folder", type=Path, default=None, help="on the disk that is to be measured")
    options = parser.parse_args()
    print(json.dumps({"case": "machine", **machine()}), flush=True)
    base = Path(tempfile.mkdtemp(prefix="kv-", dir=options.folder))
    for name in options.cases.split(","):
        anyio.run(CASES[name], options, base / name)
    shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main()
