"""Block hit rates of the eviction policies on traces of real traffic, beside the offline optimum: a table per trace.

    python benchmarks/hit_rates.py TRACE... [--blocks 500,1000,...] [--report-from 0.5] [--policies lru,...] [--json]

A trace is a file of Mooncake's release (``kvcache-ai/Mooncake``, FAST 2025): JSON lines with ``timestamp`` and
``hash_ids``, compressed or not. Each of its ids is a block of 512 tokens. The figures depend on nothing but the trace:
no machine, no clock. ``literal`` is the formula ``(now - last use) x importance``, of which the lowest leaves: taken at
its word it throws out what was just used. It stands here as the bad example and is no policy of the package.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from attrs import frozen

from kimicore.contracts import BlockKey, Eviction
from kimicore.plugins import KINDS, resolve
from kimicore.policies.eviction.candidates import Candidates
from kimicore.sim.cache import CacheRequest, replay_cache, replay_optimum
from kimicore.sim.traces import read_trace

BLOCKS = "500,1000,2000,5000,10000,20000,50000"


@frozen
class Literal:
    """The bad example: of the blocks that may go, the one used last goes first (importance is 1.0 throughout)."""

    name: str = "literal"

    def start(self, capacity_blocks: int, ghost_blocks: int, seed: int) -> LiteralState:
        """Return fresh state."""
        return LiteralState()


class LiteralState(Candidates):
    """Blocks by last use, leaf before root; the most recent is taken first."""

    def __init__(self) -> None:
        super().__init__()
        self._order: dict[BlockKey, None] = {}
        self._request: list[BlockKey] = []  # told leaf first; the leaf has to be the most recent

    def added(self, key: BlockKey, parent: BlockKey | None, depth_blocks: int, now_s: float) -> None:
        """Note the block."""
        self._parent[key] = parent
        self.touched(key, now_s)

    def touched(self, key: BlockKey, now_s: float) -> None:
        """Note the block as the most recent but for those that follow it."""
        self._aside.pop(key, None)
        self._request.append(key)
        if self._parent[key] is None:
            self._settle()

    def removed(self, key: BlockKey) -> None:
        """Forget the block."""
        self._left(key)
        self._order.pop(key, None)

    def victims(self, count: int, evictable: Callable[[BlockKey], bool], now_s: float) -> list[BlockKey]:
        """Return what was used last."""
        self._settle()
        return super().victims(count, evictable, now_s)

    def _settle(self) -> None:
        for key in reversed(self._request):
            self._order.pop(key, None)
            self._order[key] = None
        self._request.clear()

    def _next(self, now_s: float) -> BlockKey | None:
        return self._order.popitem()[0] if self._order else None

    def _back(self, key: BlockKey) -> None:
        self._order[key] = None


def requests_of(path: Path) -> list[CacheRequest]:
    """Return when each request of a trace comes and the keys of its blocks."""
    return [(one.arrived_s, [block.to_bytes(8, "big") for block in one.blocks]) for one in read_trace(path)]


def rates(
    name: str, eviction: Eviction | None, requests: Sequence[CacheRequest], blocks: Sequence[int], report_from: float
) -> list[float]:
    """Return the hit rate at each size of the cache; without a policy that of the optimum."""
    if eviction is None:
        return [replay_optimum(requests, size, report_from=report_from).block_hit_rate for size in blocks]
    return [replay_cache(requests, eviction, size, report_from=report_from).block_hit_rate for size in blocks]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--blocks", default=BLOCKS, help="sizes of the cache, in blocks")
    parser.add_argument(
        "--report-from", type=float, default=0.0, help="share of the requests that only warms the cache"
    )
    parser.add_argument("--policies", default=",".join([*sorted(KINDS["eviction"]), "literal", "optimum"]))
    parser.add_argument("--json", action="store_true", help="one JSON line per policy and trace instead of tables")
    options = parser.parse_args()
    blocks = [int(one) for one in options.blocks.split(",")]
    for path in options.traces:
        requests = requests_of(path)
        if not options.json:
            print(f"\n{path.name}, {len(requests)} requests, counted from {options.report_from:.0%}\n")
            print("| Policy | " + " | ".join(f"{one:,}" for one in blocks) + " |")
            print("| --- |" + " ---: |" * len(blocks))
        for name in options.policies.split(","):
            special = {"literal": Literal(), "optimum": None}
            eviction = special[name] if name in special else resolve("eviction", name)
            found = rates(name, eviction, requests, blocks, options.report_from)
            if options.json:
                record = {"trace": path.name, "policy": name, "blocks": blocks, "block_hit_rate": found}
                print(json.dumps(record | {"report_from": options.report_from}), flush=True)
            else:
                print(f"| `{name}` | " + " | ".join(f"{100 * one:.1f}" for one in found) + " |", flush=True)


if __name__ == "__main__":
    main()
