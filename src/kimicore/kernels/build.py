"""Compile the native kernels once, on first use, into the user's cache, and load them.

A library is named by a digest of its sources, the flags, the compiler's version and the processor, so that a
cache folder may be shared by machines and by versions of this package. Whatever goes wrong gives a reason and no
exception: the torch reference serves then.

The libraries contain no threads of their own: they are handed the entry of one team (``kimicore.kernels.team``).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Final

from attrs import frozen

__all__ = ["NativeLibrary", "build_library", "cache_folder", "compile_all", "load_library"]

COMPILE_LIMIT_S: Final = 120.0
# No contraction: a multiply and an add are fused where the source says so, and nowhere else (see simd.h).
FLAGS: Final = (
    *("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-strict-aliasing"),
)
_TUNING: Final = {
    "x86_64": "-march=native",
    "AMD64": "-march=native",
    "aarch64": "-mcpu=native",
    "arm64": "-mcpu=native",
}
_LOCK: Final = Lock()


@frozen(eq=False)
class NativeLibrary:
    """A loaded library, or None and the reason why there is none."""

    handle: ctypes.CDLL | None
    reason: str


class _CannotBuildError(Exception):
    """Why there is no library; never leaves this module."""


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of compiled kernels: ``native/`` in ``$KIMICORE_CACHE``, or in the user's cache."""
    if chosen := environ.get("KIMICORE_CACHE"):
        return Path(chosen) / "native"
    base = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "kimicore" / "native"


def _compiler(environ: Mapping[str, str]) -> list[str]:
    if chosen := environ.get("CXX"):
        command = shlex.split(chosen)
        if not command or shutil.which(command[0], path=environ.get("PATH")) is None:
            raise _CannotBuildError(f"the compiler CXX={chosen!r} is not there")
        return command
    for name in ("c++", "g++", "clang++"):
        if found := shutil.which(name, path=environ.get("PATH")):
            return [found]
    raise _CannotBuildError("no C++ compiler (install g++ or clang++, or name one in CXX)")


def _run(command: Sequence[str], limit_s: float) -> str:
    # A session of its own: what the compiler has started ends with it, and a terminal's interrupt is not its business.
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise _CannotBuildError(f"{command[0]} took over {limit_s:g} s") from None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
    text = output.decode(errors="replace")
    if process.returncode != 0:
        errors = [line for line in text.splitlines() if "error" in line.lower()] or text.splitlines()[-1:]
        raise _CannotBuildError(f"{command[0]} failed: {(errors or ['no message'])[0][:300]}")
    return text


@lru_cache(maxsize=4)
def _version(compiler: tuple[str, ...], limit_s: float) -> str:
    return (_run([*compiler, "--version"], limit_s).splitlines() or ["a compiler"])[0]


@lru_cache(maxsize=1)
def _processor() -> str:
    """Return what the code is tuned to: the first processor's name and abilities."""
    try:
        first = Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    kept = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU ")
    return "\n".join(line for line in first if line.startswith(kept))


def _private_folder(folder: Path) -> None:
    """Make the folder; refuse one that others may write into, since what lies there is loaded and run."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if hasattr(os, "geteuid") and found.st_uid != os.geteuid():
        raise _CannotBuildError(f"{folder} belongs to another user")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _CannotBuildError(f"{folder} can be written by other users")


def _compile(command: Sequence[str], source: Path, target: Path, limit_s: float) -> None:
    """Compile beside the target and rename, so that a reader finds all of it or nothing."""
    handle, name = tempfile.mkstemp(prefix=".build-", suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        _run([*command, "-o", name, str(source)], limit_s)
        os.replace(name, target)
    finally:
        Path(name).unlink(missing_ok=True)


def _open(target: Path) -> ctypes.CDLL:
    owner = target.stat()
    if hasattr(os, "geteuid") and owner.st_uid != os.geteuid():
        raise _CannotBuildError(f"{target} belongs to another user")
    return ctypes.CDLL(str(target))


def build_library(
    source: Path,
    *,
    environ: Mapping[str, str] = os.environ,
    limit_s: float = COMPILE_LIMIT_S,
) -> NativeLibrary:
    """Compile ``source`` unless it is in the cache, and load it; ``limit_s`` seconds bound the compiler.

    Headers (``*.h``) may lie beside it, one folder above, and in the other folders there. ``CXX``, ``PATH``,
    ``KIMICORE_CACHE`` and ``XDG_CACHE_HOME`` are read from ``environ``. Several processes may build at once: each
    renames a whole file into place.
    """
    try:
        compiler = _compiler(environ)
        version = _version(tuple(compiler), limit_s)
        headers = sorted(
            {*source.parent.glob("*.h"), *source.parent.parent.glob("*.h"), *source.parent.parent.glob("*/*.h")}
        )
        tuning = _TUNING.get(platform.machine())
        command = [*compiler, *FLAGS, *([tuning] if tuning else [])]
        parts = [" ".join(command), version, _processor(), *(p.read_text() for p in (source, *headers))]
        digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()
        folder = cache_folder(environ)
        _private_folder(folder)
        target = folder / f"{source.stem}-{digest}.so"
        if not target.exists():
            _compile(command, source, target, limit_s)
        try:
            return NativeLibrary(_open(target), f"compiled by {version}")
        except OSError:  # damaged: once more, from the source
            _compile(command, source, target, limit_s)
            return NativeLibrary(_open(target), f"compiled by {version}")
    except _CannotBuildError as fault:
        return NativeLibrary(None, str(fault))
    except (OSError, ValueError, RuntimeError) as fault:  # RuntimeError: no home folder
        return NativeLibrary(None, f"cannot build {source.name}: {fault}")


@lru_cache(maxsize=64)
def _loaded(source: Path) -> NativeLibrary:
    return build_library(source)


def load_library(source: Path) -> NativeLibrary:
    """Return :func:`build_library` of the source with the process's environment, once per process."""
    with _LOCK:
        return _loaded(source)


def compile_all(sources: Sequence[Path]) -> None:
    """Compile what is not in the cache yet, two at a time: the first start of a machine takes half as long."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        list(pool.map(build_library, sources))
