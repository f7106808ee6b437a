"""How the disk tier's limit is shared out."""

from __future__ import annotations

from typing import Final

from attrs import frozen

from kimicore.kv.record import PAGE_BYTES

__all__ = ["Space"]

_USABLE: Final = 0.9  # of the space; the rest is dead bytes, so that winning back a byte copies ten at the worst


@frozen
class Space:
    """How a limit in bytes is shared out.

    Puts stay ``reserve_bytes`` under the limit: compaction writes there what it copies, before it removes the old file.
    """

    limit_bytes: int
    segment_bytes: int

    @property
    def slack_bytes(self) -> int:
        """Bytes for what the file system adds to files."""
        return 2 * PAGE_BYTES + self.segment_bytes // 64

    @property
    def reserve_bytes(self) -> int:
        """Bytes that only compaction may use."""
        return self.segment_bytes + self.slack_bytes

    @property
    def ceiling_bytes(self) -> int:
        """Bytes that puts may fill."""
        return self.limit_bytes - self.reserve_bytes

    def capacity_bytes(self, fixed_bytes: int) -> int:
        """Return how many bytes of records can be live, where other files take up ``fixed_bytes``."""
        # Where all is compacted, two segments that follow each other hold a segment's worth, and each has a header.
        headers = self.segment_bytes / (self.segment_bytes + 2 * PAGE_BYTES)
        usable = (self.ceiling_bytes - fixed_bytes) * _USABLE - 3 * PAGE_BYTES
        return max(0, int(usable * headers) // PAGE_BYTES * PAGE_BYTES)
