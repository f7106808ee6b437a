"""The system calls of the disk tier, in one place: faults can be planted here, and writes recorded."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

__all__ = ["Buffer", "Files", "write_whole"]

Buffer = bytes | memoryview


class Files:
    """Files of one folder, by descriptors: thin over the system's calls, which raise OSError as they do there.

    ``folder`` is the folder's descriptor, so that nothing that happens to its path sends a file elsewhere.
    """

    def open(self, folder: int, name: str, flags: int) -> int:
        """Open a file, never through a link; one that is created is its owner's alone."""
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        """Read once at ``offset`` and return the number of bytes, 0 at the file's end."""
        return os.preadv(fd, [into], offset)

    def write(self, fd: int, parts: Sequence[Buffer], offset: int) -> int:
        """Write once at ``offset`` and return the number of bytes, which may be less than all."""
        return os.pwritev(fd, parts, offset)

    def sync(self, fd: int) -> None:
        """Return when the file's bytes and length are on the disk."""
        os.fdatasync(fd)

    def sync_folder(self, folder: int) -> None:
        """Return when the folder's names are on the disk."""
        os.fsync(folder)

    def cut(self, fd: int, size_bytes: int) -> None:
        """Cut the file to a length."""
        os.ftruncate(fd, size_bytes)

    def remove(self, folder: int, name: str) -> None:
        """Remove a file's name."""
        os.unlink(name, dir_fd=folder)

    def replace(self, folder: int, old: str, new: str) -> None:
        """Rename a file, over another one if need be."""
        os.replace(old, new, src_dir_fd=folder, dst_dir_fd=folder)

    def names(self, folder: int) -> list[str]:
        """Return the names in the folder."""
        return os.listdir(folder)

    def status(self, fd: int) -> os.stat_result:
        """Return what the system says of an open file."""
        return os.fstat(fd)

    def forget(self, fd: int, offset: int, size_bytes: int) -> None:
        """Tell the system that it need not keep these bytes in memory."""
        os.posix_fadvise(fd, offset, size_bytes, os.POSIX_FADV_DONTNEED)

    def taken_bytes(self, fd: int) -> int:
        """Return the bytes that a file takes up: its length or its disk space, whichever is more."""
        status = self.status(fd)
        return max(status.st_size, status.st_blocks * 512)


def write_whole(files: Files, fd: int, parts: Sequence[Buffer], offset: int) -> int:
    """Write all parts one after the other at ``offset``; return their bytes, or raise OSError."""
    left = [memoryview(part).cast("B") for part in parts if len(part)]
    total = sum(len(part) for part in left)
    done = 0
    while done < total:
        count = files.write(fd, left, offset + done)
        if count <= 0:
            raise OSError(errno.EIO, "nothing was written")
        done += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if left:
            left[0] = left[0][count:]
    return total
