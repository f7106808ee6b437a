"""``kimicore simulate``: the engine's decisions on a trace or a drawn load, without a model."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, evolve

from kimicore.cli.options import Progress, check_writable, policy_settings
from kimicore.errors import ConfigError
from kimicore.plugins import resolve
from kimicore.sim.cache import replay_cache
from kimicore.sim.cost import StepTimes
from kimicore.sim.html import write_page
from kimicore.sim.keys import TraceKeys
from kimicore.sim.loads import CHAT, CODE, LOADS, scaled, with_tiers
from kimicore.sim.settings import SimConfig
from kimicore.sim.simulator import simulate
from kimicore.sim.traces import TraceRequest, read_trace, write_trace
from kimicore.types import TIERS

__all__ = ["add_parser", "run"]

KV_TOKENS = 1 << 19
"""Size of the KV arena where nothing is said: what the default step times' processor has beside its weights."""
BLOCK_TOKENS = 256
SHOW_EVERY_S = 0.5
_ENGINE = {
    "max_batch_size": "rows of a step at most",
    "max_batch_tokens": "tokens of a step at most",
    "min_batch_size": "while others run, prompts wait until so many do ...",
    "max_wait_s": "... or the oldest has waited so long",
    "target_step_s": "what steps beside streams should take",
    "max_waiting": "requests that may wait",
}
_NOT_OF_A_CACHE = {
    **dict.fromkeys(("batching", "padding", *_ENGINE, "times", "not_streamed", "no_leap"), "has no engine"),
    **dict.fromkeys(("load", "tiers"), "takes the requests one after the other"),
    "targets": "has no times",
    "html": "has nothing to plot",
}
"""Options that ``--cache-only`` refuses, with what it has to say to each."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("simulate", help="what the engine's policies do with a trace, without a model")
    load = parser.add_argument_group("the load")
    load.add_argument("trace", nargs="?", help="a trace: Mooncake JSONL, Azure CSV or our JSONL, also as .xz or .gz")
    load.add_argument("--limit", type=int, metavar="N", help="only the first N requests of the trace")
    load.add_argument("--generate", choices=sorted(LOADS), help="draw a load instead of reading a trace")
    load.add_argument("--rate", type=float, help="with --generate: requests (multi-turn: talks) a second")
    load.add_argument("--duration", type=float, metavar="S", help="with --generate: for so many seconds")
    load.add_argument("--lengths", choices=("chat", "code"), help="with --generate: of prompts and outputs (chat)")
    load.add_argument("--tenants", type=int, metavar="N", help="with --generate: so many tenants (1)")
    load.add_argument("--load", type=float, metavar="X", help="arrivals X times as close together")
    load.add_argument("--tiers", metavar="20/60/20", help="draw tiers: interactive/standard/background shares")
    load.add_argument("--save", metavar="FILE", help="write the load as a trace of our format")
    _add_engine(parser.add_argument_group("the engine"))
    out = parser.add_argument_group("the report")
    out.add_argument("--targets", metavar="TIER=S,...,tpot=S", help="such as interactive=0.5,standard=2,tpot=0.05")
    out.add_argument(
        "--report-from", type=float, default=0.0, metavar="SHARE", help="leave that share's first requests out"
    )
    out.add_argument("--json", metavar="FILE", help="write all figures as JSON (- for standard output)")
    out.add_argument("--html", metavar="FILE", help="write a page with plots")
    out.add_argument("-q", "--quiet", action="store_true", help="no progress on standard error")
    parser.set_defaults(run=run)


def _add_engine(group: argparse._ArgumentGroup) -> None:
    for kind in ("eviction", "batching", "padding"):
        group.add_argument(f"--{kind}", metavar="NAME", help=f"the {kind} policy")
    group.add_argument(
        "--set", action="append", default=[], metavar="KIND.FIELD=VALUE", help="a policy's setting; several times"
    )
    group.add_argument("--kv-blocks", type=int, metavar="N", help=f"blocks of the KV arena (for {KV_TOKENS} tokens)")
    group.add_argument(
        "--block-tokens", type=int, metavar="N", help=f"tokens of a block (the trace's, or {BLOCK_TOKENS})"
    )
    for name, text in _ENGINE.items():
        seconds = name.endswith("_s")
        option = f"--{name.replace('_', '-')}"
        group.add_argument(option, type=float if seconds else int, metavar="S" if seconds else "N", help=text)
    group.add_argument("--times", metavar="FILE", help="step times that kimicore bench --fit wrote")
    group.add_argument("--not-streamed", action="store_true", help="nobody reads along: prompts in full chunks")
    group.add_argument("--no-leap", action="store_true", help="plan every step (slower; the same figures)")
    group.add_argument("--seed", type=int, default=0, help="of drawn loads, tiers and policies")
    group.add_argument("--cache-only", action="store_true", help="no engine: a bare cache of --kv-blocks blocks")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    _check(options)
    requests = load_of(options)
    if options.cache_only:
        figures = _replay(requests, options)
        print(
            f"{100 * figures['block_hit_rate']:.2f} % of {figures['blocks']} blocks found ({figures['policy']})",
            file=_aside(options),
        )
    else:
        show = _Show(options.quiet)
        report = evolve(
            simulate(requests, config=config_of(requests, options), progress=show),
            first=int(options.report_from * len(requests)),
        )
        show.clear()
        print(report.table(), file=_aside(options))
        figures = report.summary()
        if options.html:
            write_page(options.html, report, title=options.trace or f"{options.generate} load")
    if options.json:
        _write(options.json, figures)
    return 0


def _check(options: argparse.Namespace) -> None:
    """Refuse what does not go together, before any work."""
    if (options.trace is None) == (options.generate is None):
        raise ConfigError("give a trace, or --generate with --rate and --duration")
    drawn = ("rate", "duration", "lengths", "tenants")
    if options.generate is None:
        given = [name for name in drawn if getattr(options, name) is not None]
        if given:
            raise ConfigError(f"--{given[0]} goes with --generate")
    elif options.rate is None or options.duration is None:
        raise ConfigError("--generate needs --rate and --duration")
    if options.limit is not None and options.limit < 1:
        raise ConfigError(f"--limit={options.limit}: must be at least 1")
    if not 0.0 <= options.report_from < 1.0:
        raise ConfigError(f"--report-from={options.report_from}: must be at least 0 and under 1")
    if options.cache_only:
        for name, why in _NOT_OF_A_CACHE.items():
            given = getattr(options, name)
            if given is not None and given is not False:
                raise ConfigError(f"--cache-only {why}; leave --{name.replace('_', '-')} out")
    for name in ("html", "save"):
        if getattr(options, name) == "-":
            raise ConfigError(f"--{name} -: name a file; only --json writes to standard output")
    for path in (options.json, options.html, options.save):
        if path is not None and path != "-":
            check_writable(path)


# ---------------------------------------------------------------- what is simulated


def load_of(options: argparse.Namespace) -> list[TraceRequest]:
    """Return the requests that the options ask for."""
    if options.generate is None:
        requests = read_trace(options.trace, options.limit)
    else:
        requests = LOADS[options.generate](
            options.rate,
            options.duration,
            seed=options.seed,
            lengths=CODE if options.lengths == "code" else CHAT,
            tenants=options.tenants or 1,
        )[: options.limit]
    if options.load is not None:
        requests = scaled(requests, options.load)
    if options.tiers is not None:
        requests = with_tiers(requests, _shares(options.tiers), options.seed)
    if options.save:
        write_trace(options.save, requests)
    return requests


def config_of(requests: Sequence[TraceRequest], options: argparse.Namespace) -> SimConfig:
    """Return the simulation's settings."""
    given: dict[str, Any] = {
        name: getattr(options, name)
        for name in (*_ENGINE, "eviction", "batching", "padding")
        if getattr(options, name) is not None
    }
    given["block_tokens"] = _block_tokens(requests, options)
    given["kv_blocks"] = _kv_blocks(given["block_tokens"], options)
    if options.times is not None:
        given["times"] = StepTimes.read(options.times)
    if options.targets is not None:
        targets = _pairs(options.targets)
        if "tpot" in targets:
            given["tpot_s"] = targets.pop("tpot")
        given["ttft_s"] = targets
    return SimConfig(
        **given,
        policy=settings_of(options.set),
        streamed=not options.not_streamed,
        leap=not options.no_leap,
        seed=options.seed,
    )


def _block_tokens(requests: Sequence[TraceRequest], options: argparse.Namespace) -> int:
    if options.block_tokens is not None:
        return int(options.block_tokens)
    return next((one.block_tokens for one in requests if one.blocks), BLOCK_TOKENS)


def _kv_blocks(block_tokens: int, options: argparse.Namespace) -> int:
    return max(1, KV_TOKENS // max(1, block_tokens)) if options.kv_blocks is None else int(options.kv_blocks)


def _replay(requests: Sequence[TraceRequest], options: argparse.Namespace) -> dict[str, Any]:
    """Replay the trace against a bare block cache."""
    if not any(one.blocks for one in requests):
        raise ConfigError("--cache-only needs a trace with block ids; nothing of this one could be found in a cache")
    block_tokens = _block_tokens(requests, options)
    keys = TraceKeys(SimConfig(block_tokens=block_tokens).block_tokens)
    settings = settings_of(options.set)
    for kind in settings:
        if kind != "eviction":
            raise ConfigError(f"--set {kind}...: --cache-only asks the eviction policy alone")
    report = replay_cache(
        [(one.arrived_s, keys.of_prompt(one)) for one in requests],
        resolve("eviction", options.eviction or "lru", settings.get("eviction")),
        _kv_blocks(block_tokens, options),
        seed=options.seed,
        report_from=options.report_from,
    )
    return {**asdict(report), "block_tokens": block_tokens}


# ---------------------------------------------------------------- reading options, writing results


def settings_of(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return policies' settings by kind from texts such as ``eviction.half_life_s=300``; a value is read as JSON, else
    as text."""
    found: dict[str, dict[str, Any]] = {}
    form, example = "KIND.FIELD=VALUE", "eviction.half_life_s=300"
    for name, value in policy_settings(texts, form, example).items():
        kind, dot, field = name.partition(".")
        if not (dot and kind and field):
            raise ConfigError(f"--set {name}={value}: write {form}, such as {example}")
        found.setdefault(kind, {})[field] = value
    return found


def _pairs(text: str) -> dict[str, float]:
    found = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            found[name.strip()] = float(value)
        except ValueError as error:
            raise ConfigError(f"--targets {part!r}: write TIER=SECONDS, or tpot=SECONDS") from error
    return found


def _shares(text: str) -> dict[str, float]:
    parts = text.split("/")
    try:
        return dict(zip(TIERS, [float(part) for part in parts], strict=True))
    except ValueError as error:
        raise ConfigError(f"--tiers {text!r}: write three shares for {'/'.join(TIERS)}, such as 20/60/20") from error


def _aside(options: argparse.Namespace) -> Any:
    """Where the table goes: standard output, unless the JSON does."""
    return sys.stderr if options.json == "-" else sys.stdout


def _write(path: str, figures: dict[str, Any]) -> None:
    text = json.dumps(figures, indent=2)
    if path == "-":
        print(text)
        return
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error


class _Show:
    """Progress on standard error, from the first half second on."""

    def __init__(self, quiet: bool) -> None:
        self._line = Progress(quiet or not sys.stderr.isatty())
        self._next_s = time.monotonic() + SHOW_EVERY_S

    def __call__(self, over: int, requests: int, now_s: float) -> None:
        """Show how far the simulation is."""
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + SHOW_EVERY_S
            self._line(f"simulating, {now_s:.0f} s of the trace,", over, requests)

    def clear(self) -> None:
        """Take the line away."""
        self._line.clear()
