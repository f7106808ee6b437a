"""Names with a hash of their own, so that one process shows what depends on a process's hash seed."""

from __future__ import annotations

from hashlib import blake2b
from zlib import crc32

__all__ = ["Key", "Name", "key_of"]


def _stirred(value: int, salt: int) -> int:
    """Return a hash that is the same in every process and different for every salt."""
    return (value * (2 * salt + 1) ^ salt * 0x9E3779B97F4A7C15) & 0x3FFFFFFFFFFFFFFF


class Key(bytes):
    """A block's key that is equal to its bytes, prints as ``label``, and hashes by ``salt``.

    Two histories that differ in ``salt`` alone see the same keys; sets and dictionaries of them differ in their
    order wherever that depends on hashes.
    """

    label: str
    _hash: int

    def __new__(cls, value: bytes, label: str, salt: int = 0) -> Key:
        """Return the key."""
        self = super().__new__(cls, value)
        self.label = label
        self._hash = _stirred(crc32(value), salt)
        return self

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return bytes.__eq__(self, other) if isinstance(other, bytes) else NotImplemented

    def __ne__(self, other: object) -> bool:
        return bytes.__ne__(self, other) if isinstance(other, bytes) else NotImplemented

    def __repr__(self) -> str:
        return self.label


class Name(str):
    """A name (a tenant's, a module's) that hashes by ``salt``; see :class:`Key`."""

    __slots__ = ("_hash",)
    _hash: int

    def __new__(cls, value: str, salt: int = 0) -> Name:
        """Return the name."""
        self = super().__new__(cls, value)
        self._hash = _stirred(crc32(value.encode()), salt)
        return self

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) if isinstance(other, str) else NotImplemented

    def __ne__(self, other: object) -> bool:
        return str.__ne__(self, other) if isinstance(other, str) else NotImplemented


def key_of(label: str, salt: int = 0) -> Key:
    """Return the key of the block that ``label`` names; the same label gives the same bytes."""
    return Key(blake2b(label.encode(), digest_size=16).digest(), label, salt)
