"""Reading past the page cache where the file system allows it: whole pages into buffers that lie on pages."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from typing import Final

from kimicore.kv.files import Files, write_whole
from kimicore.kv.record import PAGE_BYTES, paged

__all__ = ["PROBE_NAME", "PageBuffers", "probe_direct", "read_pages"]

PROBE_NAME: Final = "probe.tmp"
_MOST_KEPT_BYTES: Final = 64 << 20


class PageBuffers(threading.local):
    """One buffer per thread that begins on a page, grown to what was asked for and used again."""

    def __init__(self) -> None:
        self._view = memoryview(b"")

    def take(self, size_bytes: int) -> memoryview:
        """Return a buffer of whole pages with room for ``size_bytes``, good until this thread takes the next.

        What it holds is what was last read into it. A very large one is not kept.
        """
        wanted = paged(max(size_bytes, 1))
        if len(self._view) >= wanted:
            return self._view[:wanted]
        view = memoryview(mmap.mmap(-1, wanted))
        if wanted <= _MOST_KEPT_BYTES:
            self._view = view
        return view


def read_pages(files: Files, fd: int, into: memoryview, offset: int) -> int:
    """Fill ``into`` (whole pages) from ``offset``; return the bytes read, fewer only where the file ends.

    Raises OSError. Past a read that is no whole number of pages there is nothing but the file's end.
    """
    done = 0
    while done < len(into):
        count = files.read(fd, into[done:], offset + done)
        done += count
        if count == 0 or count % PAGE_BYTES:
            break
    return done


def probe_direct(files: Files, folder: int, buffers: PageBuffers) -> str:
    """Write a page, read it back past the page cache; return "" where that works, else the reason.

    Raises OSError where the page cannot even be written.
    """
    page = os.urandom(64).ljust(PAGE_BYTES, b"k")
    with contextlib.suppress(FileNotFoundError):
        files.remove(folder, PROBE_NAME)
    fd = files.open(folder, PROBE_NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        write_whole(files, fd, [page], 0)
        return _read_back(files, folder, buffers.take(PAGE_BYTES), page)
    finally:
        files.close(fd)
        files.remove(folder, PROBE_NAME)


def _read_back(files: Files, folder: int, into: memoryview, page: bytes) -> str:
    try:
        fd = files.open(folder, PROBE_NAME, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        return f"the file system refuses direct reads ({errno.errorcode.get(error.errno or 0, error)})"
    try:
        into[:] = bytes(len(into))
        read = read_pages(files, fd, into, 0)
        return "" if read == len(page) and into == page else "a direct read gave other bytes than were written"
    except OSError as error:
        return f"a direct read failed ({errno.errorcode.get(error.errno or 0, error)})"
    finally:
        files.close(fd)
