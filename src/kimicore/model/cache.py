"""The folder where fetched models are kept: verified once, replaced whole, safe for several processes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kimicore.errors import ModelLoadError

__all__ = ["ModelCache", "cache_folder"]

_CHUNK_BYTES = 1 << 20


def cache_folder() -> Path:
    """Return the folder for everything that KimiCore keeps: $KIMICORE_CACHE, else the user's cache folder."""
    own = os.environ.get("KIMICORE_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME")
    try:
        base = Path(shared) if shared and Path(shared).is_absolute() else Path.home() / ".cache"
    except RuntimeError as error:
        raise ModelLoadError("there is no home folder to cache models in: set KIMICORE_CACHE") from error
    return base / "kimicore"


class ModelCache:
    """Whole files by name, each with its expected size and sha256.

    A file's hash is recorded beside it with its size and modification time, so that it is read once and
    not at every start. Where the folder belongs to another user, the record counts for nothing and the
    file is hashed each time. Raises :class:`~kimicore.ModelLoadError` where the folder cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            # mkdir(parents=True) would give the folders above the default mode, open to everybody.
            for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
                missing.mkdir(mode=0o700, exist_ok=True)
            status = folder.stat()
        except OSError as error:
            raise self.unusable(error) from error
        user = getattr(os, "geteuid", lambda: status.st_uid)()
        self._trusted = status.st_uid == user and not status.st_mode & 0o022

    def unusable(self, error: OSError) -> ModelLoadError:
        """Return the error that names the folder, the reason and the remedy."""
        return ModelLoadError(
            f"{self.folder}: models cannot be cached here: {error.strerror or error}; "
            "set KIMICORE_CACHE to a folder that can be written and has room"
        )

    def find(self, name: str, size_bytes: int, sha256: str) -> Path | None:
        """Return a cached file that is intact, None where there is none or it is not what it should be."""
        path, record = self.folder / name, self.folder / f"{name}.json"
        try:
            status = path.stat()
            if status.st_size != size_bytes:
                return None
            state = {"sha256": sha256, "size_bytes": size_bytes, "mtime_ns": status.st_mtime_ns}
            if self._trusted and _recorded(record) == state:
                return path
            digest = hashlib.sha256()
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
        except OSError:
            return None
        if digest.hexdigest() != sha256:
            return None
        with suppress(OSError):  # a folder that can only be read still serves
            self._write_record(record, state)
        return path

    def _write_record(self, record: Path, state: dict[str, object]) -> None:
        handle, name = tempfile.mkstemp(dir=self.folder, prefix=".record-")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(state, file)
        os.replace(name, record)

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Hold off other processes and threads that fetch the same file, as far as the file system can."""
        try:
            import fcntl
        except ImportError:  # elsewhere two fetches at once do the work twice; the rename stays safe
            yield
            return
        try:
            handle = os.open(self.folder / f".{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self.unusable(error) from error
        try:
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    @contextmanager
    def workspace(self, name: str) -> Iterator[Path]:
        """Give a folder for a fetch on the cache's own file system, empty and gone afterwards."""
        try:
            work = Path(tempfile.mkdtemp(dir=self.folder, prefix=f".fetch-{name}-"))
        except OSError as error:
            raise self.unusable(error) from error
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def sweep(self, name: str) -> None:
        """Remove what a killed fetch of the same file left; only while its lock is held."""
        for left in self.folder.glob(f".fetch-{name}-*"):
            shutil.rmtree(left, ignore_errors=True)

    def place(self, complete: Path, name: str) -> Path:
        """Move a complete, verified file into the cache in one step that a crash cannot halve."""
        target = self.folder / name
        with complete.open("rb+") as file:
            os.fsync(file.fileno())
        complete.chmod(0o600)
        os.replace(complete, target)
        if hasattr(os, "O_DIRECTORY"):
            with suppress(OSError):
                handle = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    os.fsync(handle)
                finally:
                    os.close(handle)
        return target


def _recorded(record: Path) -> object:
    try:
        with record.open("rb") as file:
            return json.loads(file.read(4096))
    except (OSError, ValueError, RecursionError):
        return None
