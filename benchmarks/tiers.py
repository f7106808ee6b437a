"""First-token times by tier under several batching policies, on a trace, around what the engine can carry.

    python benchmarks/tiers.py azure_conv.csv.xz [--first 0.5] [--loads 0.7,0.9,1.1] [--set key=value ...]

Requests get their tiers by a seeded hash: 20 % interactive (first token within 1 s), 60 % standard (3 s), 20 %
background (no bound). Capacity is the highest factor on the trace's rate at which ``fcfs`` ends within 5 % of the
arrivals' span. Each line of the output is a JSON object: the capacity, then one per load, policy and tier. A refused
request has missed its target and counts as an endless wait. Everything is simulated with the default step times, so
the figures do not depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from attrs import evolve

from kimicore.sim.settings import SimConfig
from kimicore.sim.simulator import simulate
from kimicore.sim.traces import TraceRequest, read_trace
from kimicore.types import TIERS, Tier

TARGETS_S = {"interactive": 1.0, "standard": 3.0, "background": math.inf}
SHARES: Mapping[Tier, float] = {"interactive": 0.2, "standard": 0.6, "background": 0.2}
SPAN = 1.05
WINDOW_S = 0.2


def configs(settings: Mapping[str, Any]) -> dict[str, SimConfig]:
    """Return the policies to compare. The fixed window starts everything that came within 200 ms together."""
    base = SimConfig()
    return {
        "fcfs": base,
        "window-200ms": evolve(base, min_batch_size=base.max_batch_size, max_wait_s=WINDOW_S),
        "shortest-remaining": evolve(base, batching="shortest-remaining"),
        "tiered": evolve(base, batching="tiered", policy={"batching": dict(settings)}),
    }


def tier_of(at: int, seed: int) -> Tier:
    """Return the tier of the request at a place of the trace."""
    digest = blake2b(f"{seed} {at}".encode(), digest_size=8).digest()
    point = int.from_bytes(digest) / 2**64
    for tier in TIERS:
        point -= SHARES[tier]
        if point < 0.0:
            return tier
    return TIERS[-1]


def at_load(requests: Sequence[TraceRequest], load: float) -> list[TraceRequest]:
    """Return the trace at ``load`` times its rate, from its first arrival on."""
    start_s = requests[0].arrived_s
    return [evolve(one, arrived_s=(one.arrived_s - start_s) / load) for one in requests]


def stretch(requests: Sequence[TraceRequest], config: SimConfig, load: float) -> float:
    """Return when the engine ends, as a multiple of the arrivals' span."""
    scaled = at_load(requests, load)
    return simulate(scaled, config=config).makespan_s / scaled[-1].arrived_s


def capacity(requests: Sequence[TraceRequest], config: SimConfig) -> float:
    """Return the highest load that ends within 5 % of the arrivals' span, to 1 %.

    An overloaded engine works at its own pace, so where it ends tells about where the capacity is.
    """
    low, high, ratio = 0.0, 1.0, stretch(requests, config, 1.0)
    while ratio <= SPAN:
        low, high = high, 2.0 * high
        ratio = stretch(requests, config, high)
    while high - low > 0.0101 * low:
        guess = SPAN * high / ratio  # the pace is the same, the span another
        middle = guess if 1.01 * low < guess < high / 1.01 else guess / 1.01 if 1.01 * low < guess <= high else 0.0
        middle = middle if low < middle < high else 0.5 * (low + high)
        found = stretch(requests, config, middle)
        if found <= SPAN:
            low = middle
            if high > 1.01 * low and stretch(requests, config, 1.01 * low) > SPAN:
                break
        else:
            high, ratio = middle, found
    return low


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that ``share`` of all do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def by_tier(requests: Sequence[TraceRequest], config: SimConfig) -> Iterator[dict[str, Any]]:
    """Yield each tier's figures."""
    report = simulate(requests, config=config)
    for tier in TIERS:
        own = [one for one in report.record.outcomes if one.request.tier == tier]
        waits = [math.inf if one.ttft_s is None else one.ttft_s for one in own]
        ends = [math.inf if one.finished_s is None else one.finished_s - one.request.arrived_s for one in own]
        yield {
            "tier": tier,
            "requests": len(own),
            "refused": sum(1 for one in own if one.reason),
            **{f"ttft_p{share}_s": round(percentile(waits, share / 100), 3) for share in (50, 90, 99)},
            "ttft_max_s": round(max(waits), 3),
            "on_time": round(sum(1 for one in waits if one <= TARGETS_S[tier]) / len(own), 4),
            "total_mean_s": round(sum(ends) / len(own), 3),
            "preemptions": sum(one.preemptions for one in own),
            "makespan_s": round(report.makespan_s, 1),
        }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--first", type=float, default=1.0, help="share of the trace's requests, from its start")
    parser.add_argument("--loads", default="0.7,0.9,1.1", help="loads, as shares of the capacity")
    parser.add_argument("--capacity", type=float, help="skip the search for the capacity")
    parser.add_argument("--policies", default="", help="only these, with commas between")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings of tiered")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    settings = {key: json.loads(value) for key, _, value in (one.partition("=") for one in options.set)}
    compared = configs(settings)
    requests = read_trace(options.trace)
    requests = requests[: max(1, int(options.first * len(requests)))]
    requests = [evolve(one, tier=tier_of(at, options.seed)) for at, one in enumerate(requests)]
    most = options.capacity or capacity(requests, compared["fcfs"])
    print(json.dumps({"trace": options.trace, "requests": len(requests), "capacity": round(most, 4)}), flush=True)
    for load in map(float, options.loads.split(",")):
        scaled = at_load(requests, load * most)
        for name, config in compared.items():
            if options.policies and name not in options.policies.split(","):
                continue
            for figures in by_tier(scaled, config):
                print(json.dumps({"load": load, "policy": name, **figures}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
