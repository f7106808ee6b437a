"""What a simulation found: figures as a table and as JSON (for the page see :mod:`kimicore.sim.html`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import asdict, frozen

from kimicore.guard import PolicyFaults
from kimicore.sim.figures import jain, quantiles, share, spread
from kimicore.sim.record import Outcome, Record, Sample
from kimicore.sim.settings import SimConfig
from kimicore.types import TIERS, EngineStats

__all__ = ["SimReport"]


@frozen(eq=False)
class SimReport:
    """The result of :func:`~kimicore.sim.simulator.simulate`.

    ``record``: what happened to each request, and in the steps. ``stats``: the engine's own counters at the end.
    ``makespan_s``: when the last request ended. ``first``: the first request that the figures count; figures of
    steps count from its arrival on. ``faults``: what each policy did wrong, over the whole run.
    """

    config: SimConfig
    record: Record
    stats: EngineStats
    makespan_s: float
    first: int = 0
    faults: Sequence[PolicyFaults] = ()

    @property
    def outcomes(self) -> Sequence[Outcome]:
        """What became of the requests that are counted, in the order of arrival."""
        return self.record.outcomes[self.first :]

    @property
    def _before(self) -> Sample:
        """The sums before the first request that is counted."""
        if self.first:
            from_s = self.record.outcomes[self.first].request.arrived_s
            for sample in self.record.samples:
                if sample.now_s >= from_s:
                    return sample
        return Sample(0.0, 0, 0, 0, 0, 0, 0, 0)

    def met(self, outcome: Outcome) -> bool:
        """Return whether a request had its tokens in time: the first by its tier's target, the others on average."""
        ttft_s, tpot_s = outcome.ttft_s, outcome.tpot_s
        if ttft_s is None or tpot_s is None:
            return False
        return ttft_s <= self.config.ttft_s[outcome.request.tier or "standard"] and tpot_s <= self.config.tpot_s

    # ------------------------------------------------------------ figures

    def summary(self) -> dict[str, Any]:
        """Return all figures as JSON's types; times in seconds, shares from 0 to 1, None where there is no figure."""
        outcomes, record, before = self.outcomes, self.record, self._before
        real = record.real_tokens - before.real_tokens
        padded = record.padded_tokens - before.padded_tokens
        span_s = self.makespan_s - outcomes[0].request.arrived_s
        done = [one for one in outcomes if one.finished_s is not None]
        output = sum([one.request.output_tokens for one in done])
        return {
            "requests": len(outcomes),
            "finished": len(done),
            "refused": {
                reason: sum([1 for one in outcomes if one.reason == reason]) for reason in ("overloaded", "too long")
            },
            "makespan_s": self.makespan_s,
            "busy_share": share(record.busy_s, self.makespan_s),
            "steps": self.stats.steps,
            **_times(outcomes),
            "gap_s": quantiles(record.gaps_s[before.gaps :], record.gap_tokens[before.gaps :]),
            "tokens": {
                "prompt": sum([one.request.prompt_tokens for one in done]),
                "cached": sum([one.cached_tokens for one in done]),
                "output": output,
                "recomputed": self.stats.recomputed_tokens,
            },
            "output_tokens_per_s": share(output, span_s),
            "hit_rate": {"device": _hit_rate(done)},
            "evicted_blocks": self.stats.evicted_blocks,
            "kv_peak_share": max([one.used_blocks for one in record.samples], default=0) / self.config.kv_blocks,
            "preemptions": sum([one.preemptions for one in outcomes]),
            "preempted_requests": sum([1 for one in outcomes if one.preemptions]),
            "padding": {"waste_share": share(padded, real + padded), "shapes": len(record.shapes)},
            "goodput": self._goodput(outcomes, span_s),
            "tiers": self._groups({name: [one for one in outcomes if tier_of(one) == name] for name in TIERS}, span_s),
            "fairness": self._fairness(span_s),
            "policy_faults": self.stats.policy_faults,
            "policies_set_aside": list(self.stats.policies_set_aside),
            "config": _config(self.config),
        }

    def _goodput(self, outcomes: Sequence[Outcome], span_s: float) -> dict[str, float]:
        good = sum([1 for one in outcomes if self.met(one)])
        return {"share": share(good, len(outcomes)), "requests_per_s": share(good, span_s)}

    def _groups(self, groups: Mapping[str, Sequence[Outcome]], span_s: float) -> dict[str, Any]:
        found = {}
        for name, outcomes in groups.items():
            if outcomes:
                done = [one for one in outcomes if one.finished_s is not None]
                found[name] = {
                    "requests": len(outcomes),
                    "finished": len(done),
                    **_times(outcomes),
                    "hit_rate": _hit_rate(done),
                    "preemptions": sum([one.preemptions for one in outcomes]),
                    "goodput": self._goodput(outcomes, span_s),
                }
        return found

    def _fairness(self, span_s: float) -> dict[str, Any]:
        """How alike the tenants are served: tokens for each second in the system, and the slowest first tokens."""
        tenants: dict[str, list[Outcome]] = defaultdict(list)
        for one in self.outcomes:
            tenants[one.request.tenant].append(one)
        speeds, slowest = [], []
        for outcomes in tenants.values():
            done = [one for one in outcomes if one.finished_s is not None]
            tokens = sum([one.request.prompt_tokens + one.request.output_tokens for one in done])
            stay_s = sum([(one.finished_s or 0.0) - one.request.arrived_s for one in done])
            speeds.append(share(tokens, stay_s))
            figures = quantiles([one.ttft_s for one in done if one.ttft_s is not None])
            if figures is not None:
                slowest.append(figures["p99"])
        return {"tenants": len(tenants), "jain": jain(speeds), "ttft_p99_spread": spread(slowest)}

    def fault_lines(self) -> list[str]:
        """Return a sentence for each policy that broke its promises, in the order batching, padding, eviction."""
        return [_fault_line(one) for one in self.faults if one.count]

    # ------------------------------------------------------------ a table

    def table(self) -> str:
        """Return the figures for a reader."""
        figures = self.summary()
        lines = [
            f"requests     {figures['finished']} finished of {figures['requests']}, "
            f"{figures['refused']['overloaded']} refused as overload, {figures['refused']['too long']} as too long",
            f"time         {figures['makespan_s']:.1f} s, {100 * figures['busy_share']:.1f} % of it in "
            f"{figures['steps']} steps",
            f"output       {figures['output_tokens_per_s']:.1f} tokens/s",
            f"good         {100 * figures['goodput']['share']:.2f} % of the requests met their targets, "
            f"{figures['goodput']['requests_per_s']:.3f} a second",
            f"cache        {100 * figures['hit_rate']['device']:.2f} % of prompt tokens found, "
            f"{figures['evicted_blocks']} blocks evicted, at most {100 * figures['kv_peak_share']:.1f} % in use",
            f"preemptions  {figures['preemptions']} of {figures['preempted_requests']} requests, "
            f"{figures['tokens']['recomputed']} tokens computed again",
            f"padding      {100 * figures['padding']['waste_share']:.2f} % of tokens, "
            f"{figures['padding']['shapes']} shapes",
            f"fairness     {figures['fairness']['jain']:.4f} (Jain) over {figures['fairness']['tenants']} tenants, "
            f"their slowest first tokens {figures['fairness']['ttft_p99_spread']:.2f} times apart",
            *[f"at fault     {line}" for line in self.fault_lines()],
            "",
            f"{'seconds':24}{'mean':>10}{'P50':>10}{'P90':>10}{'P99':>10}{'P99.9':>10}{'max':>10}",
        ]
        names = {"ttft_s": "first token", "tpot_s": "per later token", "gap_s": "between tokens", "total_s": "whole"}
        lines += [_line(label, figures[name]) for name, label in names.items()]
        if len(figures["tiers"]) > 1:
            for tier, own in figures["tiers"].items():
                met = 100 * own["goodput"]["share"]
                lines += ["", f"{tier}: {own['requests']} requests, {met:.2f} % met their targets"]
                lines += [_line(label, own[name]) for name, label in names.items() if name in own]
        return "\n".join(lines)


def tier_of(outcome: Outcome) -> str:
    """Return a request's tier."""
    return outcome.request.tier or "standard"


def _fault_line(faults: PolicyFaults) -> str:
    times = "once" if faults.count == 1 else f"{faults.count} times"
    broke = f"the {faults.kind} policy {faults.name!r} broke its promises {times}"
    if faults.set_aside:
        return f"{broke} and was set aside; the built-in default served since"
    return f"{broke}; each time the built-in default served instead"


def _times(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    done = [one for one in outcomes if one.finished_s is not None]
    return {
        "queue_s": quantiles([one.started_s - one.request.arrived_s for one in done if one.started_s is not None]),
        "ttft_s": quantiles([one.ttft_s for one in done if one.ttft_s is not None]),
        "tpot_s": quantiles([one.tpot_s for one in done if one.tpot_s is not None and one.request.output_tokens > 1]),
        "total_s": quantiles([one.finished_s - one.request.arrived_s for one in done if one.finished_s is not None]),
    }


def _hit_rate(done: Sequence[Outcome]) -> float:
    return share(sum([one.cached_tokens for one in done]), sum([one.request.prompt_tokens for one in done]))


def _config(config: SimConfig) -> dict[str, Any]:
    shown = asdict(config, recurse=False)
    shown["times"] = asdict(config.times)
    shown["policy"] = {kind: dict(own) for kind, own in config.policy.items()}
    return shown


def _line(label: str, figures: Mapping[str, float] | None) -> str:
    if figures is None:
        return f"  {label:22}{'-':>10}"
    return f"  {label:22}" + "".join(f"{value:10.4f}" for value in figures.values())
