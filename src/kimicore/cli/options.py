"""Options that several commands share."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kimicore.config import EngineConfig
from kimicore.errors import ConfigError
from kimicore.policies.precision.named import policy_named

__all__ = [
    "DEMO",
    "NO_MAPS",
    "Progress",
    "add_activations_option",
    "add_engine_options",
    "add_sampling_options",
    "add_skip_layers_option",
    "add_weight_options",
    "check_writable",
    "engine_config",
    "policy_settings",
    "sampling",
    "skipped_layers",
    "weight_settings",
]

DEMO = "smollm2-135m-instruct"
NO_MAPS = ("stored", "none")
_MOST_DIGITS = 9  # Python reads no number of thousands of digits
_SAMPLING: dict[str, tuple[Callable[[str], Any], str]] = {
    "max_tokens": (int, "most tokens to generate (default 256)"),
    "temperature": (float, "0 takes the most likely token"),
    "top_k": (int, "choose among this many tokens (0: all)"),
    "top_p": (float, "choose among the tokens that hold this share of the probability"),
    "min_p": (float, "drop tokens less likely than this times the most likely one"),
    "repetition_penalty": (float, "over 1: tokens that were seen become less likely"),
    "seed": (int, "the same seed gives the same text"),
}


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add what every command that opens an engine takes."""
    parser.add_argument("-m", "--model", default=DEMO, help=f"alias, folder, GGUF file or hub id (default {DEMO})")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    add_weight_options(parser)
    add_activations_option(parser)
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    parser.add_argument("--kv-device-bytes", metavar="SIZE", help="size of the KV arena, such as 512MiB")
    parser.add_argument("--kv-precision", default="full", help="of the KV: full, int8 or int4")
    parser.add_argument("--kv-host-bytes", metavar="SIZE", help="size of a second tier of the KV cache in host memory")
    parser.add_argument("--kv-disk-dir", metavar="DIR", help="folder of a third tier, which outlives the process")
    parser.add_argument("--kv-disk-bytes", metavar="SIZE", help="bytes that it may take (default: up to 8GiB)")
    parser.add_argument("--context-tokens", type=int, help="longest prompt and output together")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress on standard error")


def add_weight_options(parser: argparse.ArgumentParser) -> None:
    """Add which weights of a model are loaded, and how they are kept."""
    parser.add_argument(
        "--precision",
        default="stored",
        metavar="NAME",
        help="of the weights: stored (as the file has them, the default), none, or a precision map to round by",
    )
    parser.add_argument(
        "--set-precision",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of that map, such as ffn=int8; may be repeated",
    )
    add_skip_layers_option(parser)


def add_skip_layers_option(parser: argparse.ArgumentParser) -> None:
    """Add which layers a model is loaded without."""
    parser.add_argument("--skip-layers", metavar="LIST", help="load no such layers, by number from 0, such as 11,12")


def add_activations_option(parser: argparse.ArgumentParser) -> None:
    """Add whether inputs to products are rounded where the precision map has it so."""
    parser.add_argument(
        "--activations",
        default="map",
        help="map (as the precision map in effect has them, the default) or 16-bit: none is rounded to 8 bits",
    )


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add the sampling fields that make sense on a command line."""
    for name, (kind, text) in _SAMPLING.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=text)
    parser.add_argument("--stop", action="append", default=[], help="end at this text; may be given several times")


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """Return the engine's settings from parsed options."""
    return EngineConfig(
        dtype=options.dtype,
        **weight_settings(options),
        activations=options.activations,
        threads=options.threads,
        kv_device_bytes=options.kv_device_bytes,
        kv_precision=options.kv_precision,
        kv_host_bytes=options.kv_host_bytes,
        kv_disk_dir=options.kv_disk_dir,
        kv_disk_bytes=options.kv_disk_bytes,
        context_tokens=options.context_tokens,
    )


def weight_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of EngineConfig that say which weights are loaded and how they are kept.

    Raises :class:`~kimicore.ConfigError` or :class:`~kimicore.PluginError` for a map or a setting that there is not,
    and for what is no list of layers, before anything is loaded.
    """
    skipped = skipped_layers(options)
    settings = policy_settings(options.set_precision, example="ffn=int8", option="--set-precision")
    if options.precision in NO_MAPS:
        if settings:
            raise ConfigError(f"--set-precision goes with --precision and a map's name, not with {options.precision!r}")
        return {"precision": options.precision, "skip_layers": skipped}
    policy_named(options.precision, settings)
    policy = {"precision": settings} if settings else {}
    return {"precision": options.precision, "policy": policy, "skip_layers": skipped}


def skipped_layers(options: argparse.Namespace) -> tuple[int, ...]:
    """Return the layers of ``--skip-layers``; raises :class:`~kimicore.ConfigError` for what is no list of them."""
    if options.skip_layers is None:
        return ()
    parts = [one.strip() for one in options.skip_layers.split(",")]
    if not all(one.isdecimal() and one.isascii() and len(one) <= _MOST_DIGITS for one in parts):
        raise ConfigError(
            f"--skip-layers {options.skip_layers!r:.80}: write layers by number, counted from 0, such as 11,12"
        )
    return tuple([int(one) for one in parts])


def sampling(options: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling fields that were given."""
    given = {name: getattr(options, name) for name in _SAMPLING if getattr(options, name) is not None}
    return {**given, "stop": options.stop} if options.stop else given


def policy_settings(
    pairs: Sequence[str], form: str = "KEY=VALUE", example: str = "half_life_s=300", option: str = "--set"
) -> dict[str, Any]:
    """Return settings from texts such as ``half_life_s=300``; a value is read as JSON, else taken as text."""
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{option} {pair!r}: write {form}, such as {example}")
        try:
            found[key.strip()] = json.loads(text)
        except (RecursionError, ValueError):
            found[key.strip()] = text.strip()
    return found


def check_writable(path: str) -> None:
    """Refuse a file that could not be written, before the work whose results it is to hold; nothing is written yet."""
    file = Path(path)
    folder = file.resolve().parent
    if not folder.is_dir():
        raise ConfigError(f"{path}: there is no folder {folder}")
    if file.is_dir():
        raise ConfigError(f"{path} is a folder: name a file")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise ConfigError(f"{path} cannot be written: permission denied")


class Progress:
    """Shows what an opening engine does as one line on standard error."""

    def __init__(self, quiet: bool) -> None:
        self._on = not quiet
        self._live = sys.stderr.isatty()
        self._last = ""
        self._what = ""

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` (bytes or steps) of ``what`` are over."""
        if not self._on:
            return
        share = f" {100 * done // total:3d} %" if total else ""
        line = f"{what}{share}"
        if self._live and line != self._last:
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
        elif not self._live and what != self._what:
            print(what, file=sys.stderr, flush=True)
        self._last, self._what = line, what

    def clear(self) -> None:
        """Take the line away."""
        if self._on and self._live and self._last:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
