"""A conversation as a file: written whole or not at all, and checked field by field when it is read."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import blake2b
from typing import Any

from attrs import evolve, frozen

from kimicore.errors import ConfigError, InvalidRequest, KimiCoreError
from kimicore.face import check_tenant
from kimicore.types import KV_PRECISIONS, KVPrecision

__all__ = ["History", "Saved", "read_saved", "write_saved"]

FORMAT, VERSION = "kimicore-session", 2
FIELDS = (
    "tenant", "template", "variables", "messages", "model", "tokenizer", "text", "token_ids", "prompt_tokens", "turns",
    "kv_precision", "sparse_decode",
)  # fmt: skip
MAX_BYTES = 64 << 20
"""Largest file that is written or read."""


@frozen
class History:
    """A conversation so far.

    ``token_ids``: the last prompt (its first ``prompt_tokens``, with ``text`` as its text) and its reply, which is the
    last message. ``ends``: per turn, tokens up to its end whose KV was computed; 0 where that is not known. ``sunk``:
    the first turns that were sent to disk. ``model``, ``tokenizer``: digests of what the ids are for.
    """

    messages: tuple[dict[str, Any], ...] = ()
    token_ids: tuple[int, ...] = ()
    prompt_tokens: int = 0
    text: str = ""
    ends: tuple[int, ...] = ()
    sunk: int = 0
    model: str = ""
    tokenizer: str = ""

    @property
    def turns(self) -> int:
        """How many replies were asked for and given."""
        return len(self.ends)

    def under(self, model: str, tokenizer: str) -> History:
        """Return the same conversation for a model; without token ids where these are another one's."""
        if not self.token_ids or (self.model, self.tokenizer) == (model, tokenizer):
            return self
        return evolve(self, token_ids=(), prompt_tokens=0, text="", ends=(0,) * len(self.ends), sunk=0)


@frozen
class Saved:
    """What the file of a session holds."""

    tenant: str
    template: str | None
    variables: Mapping[str, Any]
    history: History
    precision: KVPrecision | None = None
    share: float | None = None


def _canonical(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, sort_keys=True, separators=(",", ":"))


def _digest(canonical: str) -> str:
    return blake2b(canonical.encode(), digest_size=16).hexdigest()


def _path(name: str, path: Any) -> str:
    try:
        where = os.fsdecode(path)
    except TypeError:
        where = ""
    if not where or "\0" in where:
        raise InvalidRequest(f"{name}={path!r}: must be a path")
    return where


# ---------------------------------------------------------------- writing


def write_saved(path: str | os.PathLike[str], saved: Saved) -> str:
    """Write a session's file and return its path; at every moment the file is the old one or the new one.

    It is its owner's alone (0o600), and on disk when this returns. Raises :class:`~kimicore.ConfigError` where it
    cannot be written.
    """
    where = _path("path", path)
    history = saved.history
    values = (saved.tenant, saved.template, saved.variables, history.messages, history.model, history.tokenizer)
    more = (history.text, history.token_ids, history.prompt_tokens, history.ends)
    kv = (saved.precision, saved.share)
    canonical = _canonical(dict(zip(FIELDS, (*values, *more, *kv), strict=True)))
    head = f'{{"format":"{FORMAT}","version":{VERSION},"digest":"{_digest(canonical)}","session":'
    data = f"{head}{canonical}}}\n".encode()
    if len(data) > MAX_BYTES:
        raise ConfigError(f"session file {where}: it would have {len(data)} bytes, and {MAX_BYTES} are the most")
    try:
        _replace(where, data)
    except OSError as error:
        raise ConfigError(f"session file {where}: cannot be written: {error.strerror or error}") from error
    return where


def _replace(where: str, data: bytes) -> None:
    folder = os.path.dirname(os.path.abspath(where))
    fd, temporary = tempfile.mkstemp(prefix=".kimicore-", suffix=".tmp", dir=folder)  # 0o600, and nobody's but ours
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, where)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder_fd)  # the new name is on disk as well
    finally:
        os.close(folder_fd)


# ---------------------------------------------------------------- reading


def read_saved(path: str | os.PathLike[str]) -> Saved:
    """Return what a session's file holds; raises :class:`~kimicore.ConfigError` that names the file and the field."""
    where = _path("resume", path)
    fault = f"session file {where}"
    try:
        data = _bounded(where)
    except OSError as error:
        raise ConfigError(f"{fault}: cannot be read: {error.strerror or error}") from error
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{fault}: it is no JSON, or was cut off: {error}") from error
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        raise ConfigError(f"{fault}: format: must be {FORMAT!r}; it is no saved session")
    if type(tree.get("version")) is not int or tree["version"] != VERSION:
        raise ConfigError(f"{fault}: version={tree.get('version')!r}: this version of kimicore reads {VERSION}")
    fields = tree.get("session")
    if not isinstance(fields, dict):
        raise ConfigError(f"{fault}: session: must be a mapping")
    try:
        saved = _saved(fields)
    except KimiCoreError as error:
        raise ConfigError(f"{fault}: {error}") from error
    if tree.get("digest") != _digest(_canonical(fields)):
        raise ConfigError(f"{fault}: digest: does not fit; the file was damaged or changed")
    return saved


def _bounded(where: str) -> bytes:
    """Return a regular file's content, looking at its size first."""
    with open(os.open(where, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"session file {where}: is no regular file")
        data = file.read(MAX_BYTES + 1) if found.st_size <= MAX_BYTES else None
    if data is None or len(data) > MAX_BYTES:
        raise ConfigError(f"session file {where}: is larger than the {MAX_BYTES} bytes that are read")
    return data


def _saved(fields: Mapping[str, Any]) -> Saved:
    from kimicore.text.chat import plain_messages, plain_variables

    for name in fields:
        if name not in FIELDS:
            raise ConfigError(f"{name[:40]}: there is no such field")
    tenant = check_tenant(_field(fields, "tenant", "text", _is_text))
    template = _field(fields, "template", "text or null", lambda one: one is None or _is_text(one))
    variables = plain_variables(_field(fields, "variables", "a mapping", lambda one: isinstance(one, dict)))
    messages = plain_messages(_field(fields, "messages", "a list", lambda one: isinstance(one, list)))
    ids = _field(fields, "token_ids", "a list of token ids", _are_counts)
    prompt = _field(fields, "prompt_tokens", f"at most the {len(ids)} token ids", lambda one: _is_count(one, len(ids)))
    ends = _field(fields, "turns", "how many tokens each turn ends at", lambda one: _are_counts(one, len(ids)))
    text = _field(
        fields, "text", "the text of the last prompt", lambda one: _is_text(one) and bool(one) == bool(prompt)
    )
    names = {name: _field(fields, name, "a digest", _is_text) for name in ("model", "tokenizer")}
    if len(ends) > len(messages) or (ends and not isinstance(messages[-1]["content"], str)):
        raise ConfigError(f"messages: do not end with the reply of the last of {len(ends)} turns")
    if bool(ids) != bool(prompt) or (ids and not ends):
        raise ConfigError(f"prompt_tokens={prompt}: do not fit to {len(ids)} token ids and {len(ends)} turns")
    history = History(tuple(messages), tuple(ids), prompt, text, tuple(ends), **names)
    precision = _field(
        fields, "kv_precision", f"one of {', '.join(KV_PRECISIONS)}", lambda one: _is_text(one) and one in KV_PRECISIONS
    )
    share = _field(
        fields, "sparse_decode", "null or a share", lambda one: one is None or (type(one) is float and 0.0 < one < 1.0)
    )
    return Saved(tenant, template, variables, history, precision, share)


def _field(fields: Mapping[str, Any], name: str, wanted: str, good: Callable[[Any], bool]) -> Any:
    if name not in fields:
        raise ConfigError(f"{name}: is missing")
    if not good(fields[name]):
        value = fields[name]
        shown = repr(value)[:40] if isinstance(value, (str, int, float)) else type(value).__name__
        raise ConfigError(f"{name}={shown}: must be {wanted}")
    return fields[name]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any, most: int = (1 << 31) - 1) -> bool:
    return type(value) is int and 0 <= value <= most


def _are_counts(value: Any, most: int = (1 << 31) - 1) -> bool:
    return isinstance(value, list) and all([_is_count(one, most) for one in value])
