"""Traces of requests: reading public ones, and writing our own."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from attrs import asdict, fields, frozen

from kimicore.checks import integer, number
from kimicore.errors import ConfigError
from kimicore.types import TIERS, Tier

__all__ = ["MOONCAKE_BLOCK_TOKENS", "TraceRequest", "read_trace", "write_trace"]

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens that one id of a Mooncake trace stands for."""
_MOST_TOKENS = 1 << 24
_LATEST_S = 1e9
_SHOWN = 80  # characters of a bad line that its error quotes


@frozen
class TraceRequest:
    """One request of a trace.

    ``arrived_s``: seconds after the trace's start. ``prompt_tokens``, ``output_tokens``: at least 1 each.
    ``blocks``: ids of the prompt's blocks of ``block_tokens`` tokens from its start, the last one perhaps not full;
    two prompts that begin with the same ids begin with the same tokens. Without ids nothing is shared. ``tier``:
    how soon its first token is wanted (None: the trace does not say). ``tenant``, ``priority``: as in
    :meth:`kimicore.Engine.generate`.

    Raises :class:`~kimicore.ConfigError` for a value that cannot be.
    """

    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    block_tokens: int = 0
    tier: Tier | None = None
    tenant: str = ""
    priority: int = 0

    def __attrs_post_init__(self) -> None:
        number("arrived_s", self.arrived_s, 0.0, _LATEST_S, ConfigError)
        integer("prompt_tokens", self.prompt_tokens, 1, _MOST_TOKENS, ConfigError)
        integer("output_tokens", self.output_tokens, 1, _MOST_TOKENS, ConfigError)
        integer("priority", self.priority, -(1 << 31), 1 << 31, ConfigError)
        if self.tier is not None and self.tier not in TIERS:
            raise ConfigError(f"tier={self.tier!r}: must be one of {', '.join(TIERS)}, or left out")
        if not isinstance(self.tenant, str):
            raise ConfigError(f"tenant={self.tenant!r}: must be text")
        if not self.blocks:
            return
        size = integer("block_tokens", self.block_tokens, 1, _MOST_TOKENS, ConfigError)
        _check_ids(("blocks", "prompt_tokens"), self.blocks, size, self.prompt_tokens)


def _check_ids(names: tuple[str, str], ids: Sequence[Any], size: int, prompt_tokens: int) -> None:
    """Refuse ids that a prompt cannot have; ``names``: of the ids and of the prompt's length, where they were read."""
    if len(ids) > -(-prompt_tokens // size):
        raise ConfigError(f"{names[0]}: {len(ids)} ids of {size} tokens are more than {names[1]}={prompt_tokens} has")
    if not set(map(type, ids)) <= {int}:
        raise ConfigError(f"{names[0]}: ids must be integers")


_NAMES = tuple(one.name for one in fields(TraceRequest))


def read_trace(path: str | os.PathLike[str], limit: int | None = None) -> list[TraceRequest]:
    """Return a trace's requests in the order in which they arrive, the first ``limit`` lines of it (None: all).

    The format is told by the content: Mooncake's JSON lines (FAST'25 release: ``timestamp`` in milliseconds,
    ``input_length``, ``output_length``, ``hash_ids`` of 512 tokens), Azure's CSV (Azure Public Dataset, LLM inference
    traces: ``TIMESTAMP,ContextTokens,GeneratedTokens``), or the JSON lines of :func:`write_trace`. Files compressed by
    xz, gzip or bzip2 are read directly. Raises :class:`~kimicore.ConfigError` with file and line for what cannot be
    read.
    """
    path = Path(path)
    try:
        with _opened(path) as file:
            requests = list(_requests(path, _lines(file, limit)))
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise ConfigError(f"the trace {path} cannot be read: {error}") from error
    if not requests:
        raise ConfigError(f"the trace {path} holds no requests")
    return sorted(requests, key=lambda one: one.arrived_s)


def write_trace(path: str | os.PathLike[str], requests: Iterable[TraceRequest]) -> None:
    """Write requests as JSON lines that :func:`read_trace` reads; fields at their defaults are left out.

    A name that ends in ``.xz`` or ``.gz`` is compressed. Raises :class:`~kimicore.ConfigError` where it cannot be
    written.
    """
    path = Path(path)
    openers: dict[str, Callable[..., IO[str]]] = {".xz": lzma.open, ".gz": gzip.open}
    opener = openers.get(path.suffix, open)
    defaults = {one.name: one.default for one in fields(TraceRequest)}
    try:
        with opener(path, "wt", encoding="utf-8") as file:
            for request in requests:
                shown = {k: v for k, v in asdict(request, recurse=False).items() if v != defaults[k]}
                file.write(json.dumps(shown, separators=(",", ":"), ensure_ascii=False) + "\n")
    except OSError as error:
        raise ConfigError(f"the trace {path} cannot be written: {error}") from error


def _opened(path: Path) -> IO[str]:
    with path.open("rb") as file:
        magic = file.read(6)
    if magic == b"\xfd7zXZ\x00":
        return lzma.open(path, "rt", encoding="utf-8")
    if magic[:2] == b"\x1f\x8b":
        return gzip.open(path, "rt", encoding="utf-8")
    if magic[:3] == b"BZh":
        return bz2.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _lines(file: Iterable[str], limit: int | None) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not empty with their numbers; a header of a CSV does not count for ``limit``."""
    left = limit
    for number_, line in enumerate(file, 1):
        line = line.strip("\ufeff \t\r\n")
        if not line:
            continue
        if left is not None and not (number_ == 1 and not line.startswith("{")):
            if left <= 0:
                return
            left -= 1
        yield number_, line


def _requests(path: Path, lines: Iterator[tuple[int, str]]) -> Iterator[TraceRequest]:
    parse: Callable[[str], TraceRequest] | None = None
    for number_, line in lines:
        try:
            if parse is None:
                parse = _format(line)
                if not line.startswith("{"):
                    continue
            yield parse(line)
        except (KeyError, RecursionError, TypeError, ValueError) as error:  # ConfigError is a ValueError
            what = str(error)
            if isinstance(error, KeyError):
                what = f"{error} is missing"
            elif isinstance(error, RecursionError):
                what = "lists or objects are nested too deeply"
            shown = line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."
            raise ConfigError(f"{path}:{number_}: {what}; the line is {shown!r}") from error


def _format(line: str) -> Callable[[str], TraceRequest]:
    """Return what parses the lines of a file whose first line is ``line``."""
    if not line.startswith("{"):
        names = [name.strip().lower() for name in line.split(",")]
        wanted = ("timestamp", "contexttokens", "generatedtokens")
        if any(name not in names for name in wanted):
            raise ValueError("neither JSON lines nor a CSV with TIMESTAMP, ContextTokens and GeneratedTokens")
        return _Azure([names.index(name) for name in wanted], line.split(",")).parse
    first = _object(line)
    if "timestamp" in first and "input_length" in first:
        return _mooncake
    if "arrived_s" in first:
        return _own
    raise ValueError("neither Mooncake's fields (timestamp, input_length, ...) nor ours (arrived_s, ...)")


def _object(line: str) -> dict[str, Any]:
    found = json.loads(line)
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def _mooncake(line: str) -> TraceRequest:
    found = _object(line)
    milliseconds = number("timestamp", found["timestamp"], 0.0, _LATEST_S * 1e3, ConfigError)
    prompt, output = [
        integer(name, found[name], 1, _MOST_TOKENS, ConfigError) for name in ("input_length", "output_length")
    ]
    ids = tuple(_list("hash_ids", found.get("hash_ids", ())))
    _check_ids(("hash_ids", "input_length"), ids, MOONCAKE_BLOCK_TOKENS, prompt)
    return TraceRequest(milliseconds / 1000.0, prompt, output, ids, MOONCAKE_BLOCK_TOKENS if ids else 0)


def _own(line: str) -> TraceRequest:
    found = _object(line)
    unknown = sorted(set(found) - set(_NAMES))
    if unknown:
        raise ValueError(f"unknown field {unknown[0]!r}; fields are {', '.join(_NAMES)}")
    if "blocks" in found:
        found["blocks"] = tuple(_list("blocks", found["blocks"]))
    missing = [name for name in _NAMES[:3] if name not in found]
    if missing:
        raise KeyError(missing[0])
    return TraceRequest(**found)


def _list(name: str, value: Any) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{name} must be a list")
    return value


class _Azure:
    """Parses the lines of one file; times count from its first line, whose clock time is the start.

    ``places``: where time, prompt and output stand among the ``columns``, whose names are the file's own.
    """

    def __init__(self, places: Sequence[int], columns: Sequence[str]) -> None:
        self._places = places
        self._columns = len(columns)
        self._names = [columns[at].strip() for at in places]
        self._start: datetime | None = None

    def parse(self, line: str) -> TraceRequest:
        """Return the line's request."""
        cells = line.split(",")
        if len(cells) != self._columns:
            raise ValueError(f"{len(cells)} columns instead of {self._columns}")
        stamp, prompt, output = (cells[at].strip() for at in self._places)
        names = self._names
        try:
            moment = datetime.fromisoformat(stamp)
        except ValueError as error:
            raise ValueError(f"{names[0]}={stamp!r}: is no date and time") from error
        if self._start is None:
            self._start = moment
        seconds = (moment - self._start).total_seconds()
        if seconds < 0.0:
            raise ValueError(f"{names[0]}={stamp!r}: is before the first line's time")
        number(names[0], seconds, 0.0, _LATEST_S, ConfigError)
        return TraceRequest(seconds, _count(names[1], prompt), _count(names[2], output))


def _count(name: str, text: str) -> int:
    """Return the tokens that a cell of a CSV says."""
    try:
        tokens = int(text)
    except ValueError as error:
        raise ValueError(f"{name}={text!r}: must be an integer") from error
    return integer(name, tokens, 1, _MOST_TOKENS, ConfigError)
