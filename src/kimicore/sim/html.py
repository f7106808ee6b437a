"""A simulation as one page: the figures, and plots that need neither a network nor scripts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from kimicore.errors import ConfigError
from kimicore.sim.charts import Chart, Line, Mark
from kimicore.sim.record import Outcome, Sample
from kimicore.sim.report import SimReport
from kimicore.types import TIERS

__all__ = ["page", "write_page"]

BINS = 120  # places in time of a plot
_TIMES = {
    "queue_s": "until its first step",
    "ttft_s": "until its first token",
    "tpot_s": "per later token, a request's mean",
    "gap_s": "from one token to the next",
    "total_s": "until its last token",
}

STYLE = """
:root { color-scheme: light dark; --ground: #fff; --ink: #1b1f24; --soft: #59636e; --rule: #d9dee3; --card: #f6f8fa;
  --line-0: #0969da; --line-1: #bc4c00; --line-2: #1a7f37; --line-3: #8250df; }
@media (prefers-color-scheme: dark) { :root { --ground: #12161b; --ink: #e8ecf0; --soft: #9aa5b1; --rule: #323a43;
  --card: #1b2128; --line-0: #58a6ff; --line-1: #ff9e57; --line-2: #4ac26b; --line-3: #c297ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 24px; max-width: 1360px; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 32px 0 12px; } h3 { font-size: 15px; margin: 0; }
.soft, .note, .legend { color: var(--soft); } .note { font-size: 13px; margin: 4px 0 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(250px, 1fr)); gap: 12px; }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 12px 14px; }
.card b { display: block; font-size: 22px; font-variant-numeric: tabular-nums; } .card span { color: var(--soft); }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(520px, 100%), 1fr)); gap: 16px; }
figure { margin: 0; background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 14px; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
svg text.tick { fill: var(--soft); } .grid { stroke: var(--rule); stroke-width: 1; }
.fault { color: var(--line-1); font-weight: 600; margin: 4px 0; }
.minor { opacity: 0.45; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; stroke: currentColor; }
.mark { stroke: currentColor; stroke-width: 1.5; stroke-dasharray: 5 4; }
.line-0 { color: var(--line-0); } .line-1 { color: var(--line-1); }
.line-2 { color: var(--line-2); } .line-3 { color: var(--line-3); }
.legend { margin: 2px 0 6px; font-size: 13px; } .key { margin-right: 16px; white-space: nowrap; }
.key::before { content: ""; display: inline-block; width: 18px; border-top: 3px solid currentColor;
  vertical-align: middle; margin-right: 6px; } .key.dashed::before { border-top: 2px dashed currentColor; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 14px 5px 0; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } pre { overflow-x: auto; font-size: 13px; }
"""


def write_page(path: str | os.PathLike[str], report: SimReport, *, title: str) -> None:
    """Write :func:`page` to a file; raises :class:`~kimicore.ConfigError` where it cannot be written."""
    try:
        Path(path).write_text(page(report, title=title), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error


def page(report: SimReport, *, title: str) -> str:
    """Return the report as an HTML page that stands alone; ``title`` names the load."""
    figures = report.summary()
    plots = "".join(one.svg() for one in _plots(report))
    config = json.dumps(figures["config"], indent=2)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Simulation: {escape(title)}</title><style>{STYLE}</style></head><body>"
        f'<h1>Simulation: {escape(title)}</h1><p class="soft">{escape(_subtitle(report))}</p>'
        f"{_faults(report)}"
        f'<section class="cards">{_cards(figures)}</section>'
        f'<h2>Over the requests, and over time</h2><section class="plots">{plots}</section>'
        f"<h2>Times</h2>{_times(figures)}<h2>Tiers</h2>{_tiers(figures)}"
        f"<h2>Settings</h2><details><summary>as JSON</summary><pre>{escape(config)}</pre></details>"
        "</body></html>\n"
    )


def _subtitle(report: SimReport) -> str:
    config = report.config
    aside = {one.kind for one in report.faults if one.set_aside}
    policies = ", ".join(
        f"{kind} {name} (set aside)" if kind in aside else f"{kind} {name}"
        for kind, name in (("batching", config.batching), ("eviction", config.eviction), ("padding", config.padding))
    )
    return (
        f"{policies}; {config.kv_blocks} KV blocks of {config.block_tokens} tokens; "
        f"at most {config.max_batch_size} rows and {config.max_batch_tokens} tokens a step"
    )


def _faults(report: SimReport) -> str:
    return "".join(f'<p class="fault">At fault: {escape(line)}.</p>' for line in report.fault_lines())


def _cards(figures: Mapping[str, Any]) -> str:
    refused = sum(figures["refused"].values())
    cards = [
        (f"{100 * figures['goodput']['share']:.2f} %", "of requests met their targets"),
        (f"{figures['goodput']['requests_per_s']:.3f}", "good requests a second"),
        (f"{figures['output_tokens_per_s']:.0f}", "output tokens a second"),
        (f"{100 * figures['hit_rate']['device']:.1f} %", "of prompt tokens cached"),
        (f"{figures['preemptions']}", "preemptions"),
        (f"{100 * figures['padding']['waste_share']:.1f} %", f"padding, {figures['padding']['shapes']} shapes"),
        (f"{figures['fairness']['jain']:.3f}", f"Jain's fairness, {figures['fairness']['tenants']} tenants"),
        (f"{figures['finished']}", f"requests finished, {refused} refused"),
    ]
    return "".join(
        f'<div class="card"><b>{escape(value)}</b><span>{escape(text)}</span></div>' for value, text in cards
    )


# ---------------------------------------------------------------- plots


def _plots(report: SimReport) -> list[Chart]:
    tiers = {
        name: [one for one in report.outcomes if (one.request.tier or "standard") == name and one.ttft_s is not None]
        for name in TIERS
    }
    present = {name: outcomes for name, outcomes in tiers.items() if outcomes}
    targets = [Mark(f"{name} target", report.config.ttft_s[name], at) for at, name in enumerate(present)]
    return [
        Chart(
            "Time to the first token",
            "seconds (logarithmic)",
            "share of requests",
            [Line(name, *_steps([one.ttft_s or 0.0 for one in outcomes])) for name, outcomes in present.items()],
            targets,
            log_x=True,
            percent=True,
        ),
        Chart(
            "Time per later token",
            "seconds, a request's mean (logarithmic)",
            "share of requests",
            [Line(name, *_steps(_tpots(outcomes))) for name, outcomes in present.items()],
            [Mark("target", report.config.tpot_s, 3)],
            log_x=True,
            percent=True,
        ),
        *_over_time(report),
    ]


def _tpots(outcomes: Sequence[Outcome]) -> list[float]:
    return [one.tpot_s or 0.0 for one in outcomes if one.request.output_tokens > 1 and one.tpot_s is not None]


def _steps(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the points of the cumulative distribution."""
    ordered = sorted(values)
    return ordered, [(at + 1) / len(ordered) for at in range(len(ordered))]


def _over_time(report: SimReport) -> list[Chart]:
    places = _binned(report.record.samples, report.makespan_s)
    times = [one.now_s for one in places]
    width_s = report.makespan_s / BINS
    real = [(b.real_tokens - a.real_tokens) / width_s for a, b in pairwise(places)]
    drawn = [(b.drawn_tokens - a.drawn_tokens) / width_s for a, b in pairwise(places)]
    refused = [one.request.arrived_s for one in report.outcomes if one.reason]
    used = [one.used_blocks / report.config.kv_blocks for one in places]
    return [
        Chart(
            "Requests in the engine",
            "seconds of the trace",
            "requests",
            [
                Line("running", times, [one.running for one in places]),
                Line("waiting", times, [one.waiting for one in places]),
            ],
            note=f"{len(refused)} requests were refused" if refused else "",
        ),
        Chart(
            "KV blocks that requests hold",
            "seconds of the trace",
            "share of all",
            [Line("held", times, used)],
            percent=True,
        ),
        Chart(
            "Tokens through the model",
            "seconds of the trace",
            "tokens a second",
            [Line("all, prompts too", times[1:], real), Line("output", times[1:], drawn)],
        ),
        _quality(report),
    ]


def _binned(samples: Sequence[Sample], makespan_s: float) -> list[Sample]:
    """Return at even places in time the last look before each."""
    found, at = [], 0
    last = Sample(0.0, 0, 0, 0, 0, 0, 0, 0)
    for place in range(BINS + 1):
        now_s = makespan_s * place / BINS
        while at < len(samples) and samples[at].now_s <= now_s:
            last = samples[at]
            at += 1
        found.append(
            Sample(now_s, last.running, last.waiting, last.used_blocks, last.real_tokens, last.drawn_tokens, 0, 0)
        )
    return found


def _quality(report: SimReport) -> Chart:
    """Plot which share of the requests that arrive at a time meets its targets."""
    outcomes = report.outcomes
    width_s = max(report.makespan_s / 40, 1e-9)
    counts: dict[int, list[int]] = {}
    for one in outcomes:
        bin_ = counts.setdefault(int(one.request.arrived_s / width_s), [0, 0])
        bin_[0] += report.met(one)
        bin_[1] += 1
    places = sorted(counts)
    return Chart(
        "Requests that meet their targets",
        "arrival, seconds of the trace",
        "share of requests",
        [Line("met", [(at + 0.5) * width_s for at in places], [counts[at][0] / counts[at][1] for at in places])],
        percent=True,
    )


# ---------------------------------------------------------------- tables


def _times(figures: Mapping[str, Any]) -> str:
    rows = [(text, figures[name]) for name, text in _TIMES.items()]
    head = "<tr><th>seconds</th><th>mean</th><th>P50</th><th>P90</th><th>P99</th><th>P99.9</th><th>max</th></tr>"
    body = "".join(_row(text, values) for text, values in rows if values)
    return f'<div class="scroll"><table>{head}{body}</table></div>'


def _row(text: str, values: Mapping[str, float]) -> str:
    cells = "".join(f"<td>{one:.4f}</td>" for one in values.values())
    return f"<tr><td>{escape(text)}</td>{cells}</tr>"


def _tiers(figures: Mapping[str, Any]) -> str:
    names = ("tier", "requests", "finished", "met targets", "first token P50", "P99", "per later token P99", "cached")
    head = "".join(f"<th>{one}</th>" for one in names)
    rows = ""
    for name, own in figures["tiers"].items():
        ttft, tpot = own["ttft_s"] or {}, own["tpot_s"] or {}
        cells = [
            name,
            str(own["requests"]),
            str(own["finished"]),
            f"{100 * own['goodput']['share']:.2f} %",
            _seconds(ttft.get("p50")),
            _seconds(ttft.get("p99")),
            _seconds(tpot.get("p99")),
            f"{100 * own['hit_rate']:.1f} %",
        ]
        rows += f"<tr>{''.join(f'<td>{escape(one)}</td>' for one in cells)}</tr>"
    return f'<div class="scroll"><table><tr>{head}</tr>{rows}</table></div>'


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f} s"
