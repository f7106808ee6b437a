"""What the engine's decisions cost: a plan of many rows by each batching policy, an eviction by each eviction policy.

    python benchmarks/decisions.py [--rows 256] [--waiting 1000] [--blocks 100000] [--victims 1000] [--repeat 30]

One JSON line per policy: medians and the largest of the repetitions, in milliseconds of processor time. A plan is
view() and plan() of an engine without a device, whose rows all generate while others wait: first with every waiting row
known from the step before ("plan"), then right after one more has come ("plan_after_arrival"). An eviction asks a full
cache of sequences of 10 blocks for its victims through the ledger, as the engine does.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

from kimicore.book import Book
from kimicore.contracts import StepLimits
from kimicore.cost import StepTimeModel
from kimicore.ledger import Ledger
from kimicore.plan import Planner
from kimicore.plugins import KINDS, resolve
from kimicore.prefix import BlockKeys, KeyContext
from kimicore.requests import NewRequest
from kimicore.sampling_params import SamplingParams
from kimicore.testing import FakeRunner
from kimicore.types import TIERS, KVClass

SIZE = 16
CLASS = KVClass("full", (0,), None, "float32", (1, 2, 1, SIZE, 1), 8 * SIZE)


class NoWords:
    """A judge of text that never ends any."""

    def accept(self, token_id: int) -> str | None:
        """Return None."""
        return None


def request(number: int, now_s: float, tokens: int = 40, limit: int = 4096) -> NewRequest:
    """Return a request whose prompt is its own."""
    return NewRequest(
        number=number,
        prompt=[number % 30_000, *range(tokens - 1)],
        limit_tokens=limit,
        params=SamplingParams(max_tokens=limit - tokens),
        seed=0,
        choice=0,
        tenant=str(number % 7),
        priority=number % 3,
        arrived_s=now_s,
        deadline_s=None,
        salt=b"",
        use_cache=True,
        leader=None,
        judge=NoWords(),
        end_ids=frozenset(),
        tier=TIERS[number % 3],
    )


def book_of(slots: int, limits: StepLimits, eviction: str = "lru") -> Book:
    """Return a book whose arena has ``slots`` blocks."""
    ledger = Ledger((CLASS,), CLASS.block_bytes, slots, SIZE, resolve("eviction", eviction))
    return Book(ledger, BlockKeys(SIZE, b"secret"), (KeyContext(),), limits, max_waiting=1 << 20)


def milliseconds(times: list[float], name: str) -> dict[str, float]:
    """Return the median and the largest of ``times`` under ``name``."""
    return {f"{name}_ms": round(1e3 * statistics.median(times), 3), f"{name}_most_ms": round(1e3 * max(times), 3)}


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Return the processor seconds that ``function`` takes, and what it returns."""
    begun = time.thread_time()
    result = function()
    return time.thread_time() - begun, result


def planning(batching: str, rows: int, waiting: int, repeat: int) -> dict[str, float]:
    """Return what planning costs with so many rows running and waiting."""
    limits = StepLimits(rows, max(512, 2 * rows), 1, 0.05, 0.05)
    book = book_of(1 << 18, limits)
    planner = Planner(resolve("batching", batching), resolve("padding", "packed"), limits)
    runner = FakeRunner((CLASS,), (1 << 18,))
    cost, now_s, number = StepTimeModel(), 0.0, 0

    def step() -> float:
        nonlocal now_s
        now_s += 0.02
        took_s, plan = timed(lambda: planner.plan(book.view(now_s), cost))
        bound = book.bind(plan)
        book.commit(bound, runner.run(bound), now_s + 0.01)
        return took_s

    for _ in range(rows + waiting):
        number += 1
        book.submit(request(number, now_s), now_s)
    while book.stats().requests_running < rows:
        step()
    for _ in range(60):
        step()
    calm, after = [], []
    for _ in range(repeat):
        calm.append(step())
        number += 1
        book.submit(request(number, now_s), now_s)
        after.append(step())
    assert not sum(one.count for one in planner.faults)
    return {**milliseconds(calm, "plan"), **milliseconds(after, "plan_after_arrival")}


def evicting(eviction: str, blocks: int, victims: int, repeat: int) -> dict[str, float]:
    """Return what it costs to take ``victims`` of ``blocks`` cached blocks."""
    ledger = Ledger((CLASS,), CLASS.block_bytes, blocks + 1, SIZE, resolve("eviction", eviction))
    keys = BlockKeys(SIZE, b"secret")
    times: list[float] = []
    sequence = 0

    def fill(count: int) -> None:
        nonlocal sequence
        for _ in range(count // 10):
            sequence += 1
            ledger.now_s = float(sequence)
            chain = keys.chain(KeyContext())
            chain.extend([sequence, *range(10 * SIZE - 1)], 10)
            slots = ledger.allocate(0, 10)
            assert slots is not None
            for at, slot in enumerate(slots):
                ledger.seal(0, slot, chain, at)
            ledger.release(0, slots[::-1])

    fill(blocks)
    for _ in range(repeat):
        took_s, slots = timed(lambda: ledger.allocate(0, victims))
        assert slots is not None
        times.append(took_s)
        ledger.release(0, slots, drop=True)
        fill(victims)
    assert not ledger.faults.count, ledger.faults.last
    return milliseconds(times, "evict")


def main() -> None:
    """Read the command line and print the lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--victims", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=30)
    options = parser.parse_args()
    print(json.dumps({"python": platform.python_version(), "machine": platform.processor() or platform.machine()}))
    for name in sorted(KINDS["batching"]):
        figures = planning(name, options.rows, options.waiting, options.repeat)
        print(json.dumps({"batching": name, "rows": options.rows, "waiting": options.waiting, **figures}), flush=True)
    for name in sorted(KINDS["eviction"]):
        figures = evicting(name, options.blocks, options.victims, options.repeat)
        print(
            json.dumps({"eviction": name, "blocks": options.blocks, "victims": options.victims, **figures}), flush=True
        )


if __name__ == "__main__":
    main()
