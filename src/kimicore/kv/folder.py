"""The folder of a disk tier: whose it is, its lock, its format, its secret."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import xxhash

from kimicore.errors import ConfigError
from kimicore.kv.direct import PROBE_NAME, PageBuffers, probe_direct
from kimicore.kv.files import Files, write_whole

__all__ = ["DiskFolder", "open_folder"]

_log = logging.getLogger("kimicore")

_FORMAT_NAME: Final = "FORMAT"
_FORMAT: Final = b"kimicore-kv 1\n"
_SECRET_NAME: Final = "secret"
_SECRET_BYTES: Final = 32
_SEGMENT: Final = re.compile(r"segment-[0-9a-f]{16}\.kv")
_LOCK_NAME: Final = "lock"
_NEW_NAME: Final = "new.tmp"
_CHOOSE: Final = "choose a folder that belongs to you alone"


class DiskFolder:
    """An open, locked folder. ``secret`` is the one of its block keys, ``store`` names what was stored under it.

    ``fixed_bytes`` is what its own small files take up; ``direct`` whether reads go past the page cache.
    """

    def __init__(self, files: Files, path: Path, fd: int) -> None:
        self.files = files
        self.path = path
        self.fd = fd
        self.secret = b""
        self.store = b""
        self.fixed_bytes = 0
        self.direct = False
        self._lock_fd = -1
        self._process = os.getpid()

    def close(self) -> None:
        """Let go of the folder and its lock."""
        lock, self._lock_fd = self._lock_fd, -1
        folder, self.fd = self.fd, -1
        with contextlib.suppress(OSError):
            if lock >= 0 and os.getpid() == self._process:
                fcntl.flock(lock, fcntl.LOCK_UN)  # a forked child holds the lock's file open too
        for fd in (lock, folder):
            if fd >= 0:
                with contextlib.suppress(OSError):
                    self.files.close(fd)

    def prepare(self, direct: str, buffers: PageBuffers) -> None:
        """Lock the folder, check its format, read or draw its secret, and try direct reads.

        Raises :class:`~kimicore.ConfigError`, or OSError where the folder cannot be written.
        """
        self._lock()
        ours = self._check_format()
        for name in (_NEW_NAME, PROBE_NAME):
            with contextlib.suppress(FileNotFoundError):
                self.files.remove(self.fd, name)
        if not ours:
            self._write(_FORMAT_NAME, _FORMAT)
        self._find_secret()
        self.store = hashlib.blake2b(b"kimicore disk tier", key=self.secret, digest_size=16).digest()
        if direct != "off":
            try:
                reason = probe_direct(self.files, self.fd, buffers)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                reason = "the disk is full"  # of blocks, perhaps, that can be read all the same
            self.direct = not reason
            if reason and direct == "on":
                raise self.refusal(f"direct reads are not to be had: {reason}", "use direct='auto' or another disk")
        for name in (_FORMAT_NAME, _SECRET_NAME, _LOCK_NAME):
            self.fixed_bytes += max(4096, self.taken_bytes(name))

    def refusal(self, reason: str, remedy: str) -> ConfigError:
        """Return the error that names the folder, what is wrong and what to do."""
        return ConfigError(f"disk folder {self.path}: {reason}; {remedy}")

    def _lock(self) -> None:
        self._lock_fd = self.files.open(self.fd, _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self.refusal(
                "another engine or process is using it", "close that one, or give each engine a folder of its own"
            ) from None

    def _check_format(self) -> bool:
        """Return whether the folder's format stands in it as it should; refuse one that is somebody else's."""
        try:
            content = self._read(_FORMAT_NAME, 1024, others=0o055)
        except FileNotFoundError:
            content = b""
        match = re.fullmatch(rb"kimicore-kv (\d{1,9})\s*", content)
        if match and int(match[1]) != 1:
            raise self.refusal(
                f"it was written in format {int(match[1])}, and this version reads format 1",
                "delete the folder, or choose another",
            )
        if match is None and self._kept_secret() is None:
            # A format that never reached the disk is blank; then the names have to be those of a KV cache.
            own: tuple[str, ...] = (_LOCK_NAME, _NEW_NAME, PROBE_NAME)
            if not content.strip(b"\0"):
                own = (*own, _FORMAT_NAME, _SECRET_NAME)
            others = [one for one in sorted(os.listdir(self.fd)) if one not in own]
            if not content.strip(b"\0"):
                others = [one for one in others if not _SEGMENT.fullmatch(one)]
            if others:
                raise self.refusal(
                    f"it holds files that are no KV cache's ({', '.join(others[:3])})", "choose an empty folder"
                )
        return content == _FORMAT

    def _kept_secret(self) -> bytes | None:
        """Return the secret that lies in the folder, None where there is none or it is damaged."""
        try:
            content = self._read(_SECRET_NAME, 1024, others=0o077)
        except FileNotFoundError:
            return None
        secret = content[:_SECRET_BYTES]
        whole = len(secret) == _SECRET_BYTES and content == secret + xxhash.xxh3_128_digest(secret)
        return secret if whole else None

    def _find_secret(self) -> None:
        """Read the secret, or draw a new one where there is none or it is damaged; nobody else may read it."""
        kept = self._kept_secret()
        seen = kept is not None and bool(os.stat(_SECRET_NAME, dir_fd=self.fd).st_mode & 0o077)
        if seen:
            _log.warning("disk folder %s: others could read its secret; that right is taken away", self.path)
        elif kept is None and any(name.startswith("segment-") for name in os.listdir(self.fd)):
            _log.warning("disk folder %s: its secret is damaged; what was stored before is dropped", self.path)
        self.secret = kept or secrets.token_bytes(_SECRET_BYTES)
        if seen or kept is None:
            self._write(_SECRET_NAME, self.secret + xxhash.xxh3_128_digest(self.secret))

    def _read(self, name: str, most: int, others: int = 0) -> bytes:
        """Return a small file's content; nothing where it is no regular file, not ours, or others have more rights."""
        try:
            fd = self.files.open(self.fd, name, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno == errno.ELOOP:  # a link
                return b""
            raise
        try:
            found = self.files.status(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077 & ~others:
                return b""
            view = memoryview(bytearray(most))
            return bytes(view[: self.files.read(fd, view, 0)])
        finally:
            self.files.close(fd)

    def _write(self, name: str, content: bytes) -> None:
        """Write a small file whole or not at all, and durably."""
        fd = self.files.open(self.fd, _NEW_NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            write_whole(self.files, fd, [content], 0)
            self.files.sync(fd)
        finally:
            self.files.close(fd)
        self.files.replace(self.fd, _NEW_NAME, name)
        self.files.sync_folder(self.fd)

    def taken_bytes(self, name: str) -> int:
        """Return the bytes that a file of the folder takes up, 0 where it is not there."""
        with contextlib.suppress(OSError):
            found = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
            return max(found.st_size, found.st_blocks * 512)
        return 0


@contextlib.contextmanager
def _refused(path: Path) -> Iterator[None]:
    """Turn what the system says into an error that names the folder, the reason and what to do."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        remedies = {
            errno.ENOTDIR: "name a folder, not a file",
            errno.EEXIST: "name a folder, not a file",
            errno.ELOOP: "its path runs in a circle of links; choose another",
            errno.ENOSPC: "make room on the disk, or choose a folder on another one",
            errno.EDQUOT: "make room in your quota, or choose a folder on another disk",
        }
        remedy = remedies.get(error.errno or 0, "make it writable for this user, or choose another folder")
        raise ConfigError(f"disk folder {path}: cannot be created or written: {reason}; {remedy}") from error


def open_folder(path: str | os.PathLike[str], direct: str, buffers: PageBuffers, files: Files) -> DiskFolder:
    """Open the folder, make it (0o700) where there is none, and take its lock.

    Raises :class:`~kimicore.ConfigError` that names the folder, the reason and the remedy.
    """
    if direct not in ("auto", "on", "off"):
        raise ConfigError(f"direct={direct!r}: must be one of auto, on, off")
    where = Path(os.fsdecode(path))
    if not str(path) or "\0" in str(where):
        raise ConfigError(f"disk folder {str(where)!r}: is not a path; name a folder")
    with _refused(where):
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = DiskFolder(files, where, os.open(where, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        try:
            found = os.fstat(folder.fd)
            if found.st_uid != os.geteuid():
                raise folder.refusal("it belongs to another user", _CHOOSE)
            if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise folder.refusal("other users can write into it", f"take that right away (chmod 700), or {_CHOOSE}")
            folder.prepare(direct, buffers)
        except BaseException:
            folder.close()
            raise
    return folder
