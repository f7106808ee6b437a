"""The lossless codec of the SSD tier: byte planes, packed or in zstd, from a block's bytes to a payload and back."""

from __future__ import annotations

import struct
import threading
from typing import Final

import numpy as np
import zstandard
from attrs import frozen
from numpy.typing import NDArray

from kimicore.checks import integer
from kimicore.errors import ConfigError
from kimicore.kernels.byte_planes import select_byte_planes

__all__ = ["CODECS", "Codec", "CorruptBlock", "Encoded"]

CODECS: Final = ("auto", "raw", "zstd", "planes-zstd", "planes-packed")
_RAW: Final = 0
_ZSTD: Final = 1
_PLANES: Final = 2
_PACKED: Final = 3

_LEAST_GAIN: Final = 1 / 64
"""A block, or a plane under a codec that was named, that would shrink by less than this is stored as it is."""
_AUTO_GAIN: Final = 1 / 16
"""The same for a plane of ``auto``. Planes of 8-bit KV shrink by 3 to 5 %, and decoding them, at 1.2 GB/s, takes longer
than reading those bytes; the planes that pay shrink by a fifth (float16) and by 60 % (bfloat16 and float32)."""

_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_MOST_BLOCK_BYTES: Final = 128 << 10
# Nothing in a plane repeats but by chance, and each such match costs its decoder more than the bits it saves. A tiny
# table and the longest minimum leave entropy coding alone. Over the exponents of real KV, beside zstd's own level 1: a
# ratio of 2.65 and not 2.45, three times as fast to encode and twice as fast to decode.
_ENTROPY_ALONE: Final = {
    "window_log": 20,
    "hash_log": 6,
    "chain_log": 6,
    "search_log": 1,
    "min_match": 7,
    "target_length": 0,
    "strategy": zstandard.STRATEGY_FAST,
}

Bytes = NDArray[np.uint8]


class CorruptBlock(Exception):
    """The payload cannot be what a codec has made of a block of this size; ``out`` holds nothing of worth."""


@frozen
class Encoded:
    """A payload, and the number of the codec that decodes it: 0 raw, 1 zstd, 2 byte planes + zstd, 3 planes, packed.

    Codec 1 is one zstd frame. Codecs 2 and 3 are the stored length of each plane (unsigned, 32 bits, little-endian),
    then the planes: one of its full length is stored as it is, a shorter one is a zstd frame or, in codec 3, packed
    (``kimicore.kernels.byte_planes``).
    """

    codec: int
    payload: bytes


class _Contexts(threading.local):
    """What each thread has of its own: zstd contexts, and room for a block's planes, which grows to the largest."""

    def __init__(self, level: int) -> None:
        self.whole = zstandard.ZstdCompressor(level=level, write_checksum=False)
        self.entropy = zstandard.ZstdCompressor(
            compression_params=zstandard.ZstdCompressionParameters(
                **_ENTROPY_ALONE, write_content_size=True, write_checksum=False
            )
        )
        self.decompressor = zstandard.ZstdDecompressor()
        self._room = np.empty(0, np.uint8)

    def room(self, planes: int, count: int) -> Bytes:
        """Return an array [planes, count] of undefined content, the thread's own until it asks again."""
        size = planes * count
        if self._room.size < size:
            self._room = np.empty(size, np.uint8)
        return self._room[:size].reshape(planes, count)


class Codec:
    """Encodes and decodes blocks, on any number of threads at once; the interpreter lock is free nearly all the time.

    ``name``: "raw"; "zstd", over the bytes as they lie; "planes-zstd" and "planes-packed", over each byte plane that
    it shrinks by 1/64 or more; "auto", planes that shrink by 1/16, packed where this machine has the native operations
    and in zstd where not. ``level`` is that of "zstd", 1 to 22; planes are entropy-coded alone. Whatever the name,
    bytes of one plane are never packed, a block that shrinks by less than 1/64 is stored raw, and every codec's
    payload can be decoded. Raises :class:`~kimicore.ConfigError` for another name or level.
    """

    def __init__(self, name: str = "auto", level: int = 1) -> None:
        if name not in CODECS:
            raise ConfigError(f"codec {name!r}: must be one of {', '.join(CODECS)}")
        self.name, self.level = name, integer("level", level, 1, 22, ConfigError)
        self._least_gain = _AUTO_GAIN if name == "auto" else _LEAST_GAIN
        self._planes = select_byte_planes()
        native = self._planes.implementation == "native"  # numpy packs and unpacks as well, at a hundredth of the speed
        self._packs = name == "planes-packed" or (name == "auto" and native)
        self._contexts = _Contexts(self.level)

    def encode(self, raw: memoryview, item_bytes: int) -> Encoded:
        """Return the contiguous bytes of one block, encoded; ``item_bytes`` is the size of its items, 1, 2 or 4."""
        items = np.frombuffer(raw, np.uint8)
        count = _plane_bytes(items.size, item_bytes)
        if self.name == "raw" or not items.size:
            return Encoded(_RAW, items.tobytes())
        codec = _ZSTD
        payload: memoryview | bytes
        if self.name == "zstd":
            payload = self._contexts.whole.compress(items.data)
        elif count == items.size:
            payload = self._shrunk(items)
        else:
            codec = _PACKED if self._packs else _PLANES
            payload = self._encode_planes(items, count)
        if len(payload) > items.size * (1.0 - _LEAST_GAIN):
            return Encoded(_RAW, items.tobytes())
        return Encoded(codec, bytes(payload))

    def decode(self, codec: int, payload: memoryview | bytes, out: memoryview, item_bytes: int) -> None:
        """Write exactly ``len(out)`` bytes, or raise :class:`CorruptBlock`; nothing else is raised for any payload.

        ``out`` is contiguous and can be written. Memory beyond it is at most its size again, whatever the payload says.
        """
        items = np.frombuffer(out, np.uint8)
        count = _plane_bytes(items.size, item_bytes)
        stored = memoryview(payload).cast("B")
        if codec == _RAW:
            if len(stored) != items.size:
                raise CorruptBlock(f"{len(stored)} raw bytes for a block of {items.size}")
            items[:] = np.frombuffer(stored, np.uint8)
        elif codec == _ZSTD and items.size:
            self._inflate(stored, items)
        elif codec in (_PLANES, _PACKED) and count != items.size:
            self._decode_planes(stored, items, count, packed=codec == _PACKED)
        else:
            raise CorruptBlock(f"codec {codec} for a block of {items.size} bytes")

    # ------------------------------------------------------------ planes

    def _encode_planes(self, items: Bytes, count: int) -> bytes:
        planes = self._contexts.room(items.size // count, count)
        self._planes.split(items, planes)
        parts = [self._packed(plane) if self._packs else self._shrunk(plane) for plane in planes]
        return b"".join([struct.pack(f"<{len(parts)}I", *map(len, parts)), *parts])

    def _promising(self, plane: Bytes) -> bool:
        return self._planes.sampled_bits(plane) <= 8.0 * (1.0 - self._least_gain)

    def _packed(self, plane: Bytes) -> memoryview | bytes:
        """Return the plane packed if that is shorter by the least gain, or as it is."""
        most_bytes = int(plane.size * (1.0 - self._least_gain))
        packed = self._planes.pack(plane, most_bytes) if self._promising(plane) else None
        return plane.data if packed is None else packed

    def _shrunk(self, plane: Bytes) -> memoryview | bytes:
        """Return a frame that is shorter by the least gain, or the plane as it is."""
        if not self._promising(plane):
            return plane.data
        frame = self._contexts.entropy.compress(plane.data)
        return frame if len(frame) <= plane.size * (1.0 - self._least_gain) else plane.data

    def _decode_planes(self, stored: memoryview, items: Bytes, count: int, *, packed: bool) -> None:
        number = items.size // count
        at = 4 * number
        if len(stored) < at:
            raise CorruptBlock(f"{len(stored)} bytes do not hold the lengths of {number} planes")
        lengths = struct.unpack(f"<{number}I", stored[:at])
        if max(lengths) > count or at + sum(lengths) != len(stored):
            raise CorruptBlock(f"planes of {lengths} bytes in a payload of {len(stored)}")
        if packed:
            if not self._planes.join_packed(np.frombuffer(stored[at:], np.uint8), lengths, items):
                raise CorruptBlock("packed planes that cannot be")
            return
        planes = list(self._contexts.room(number, count))
        for index, length in enumerate(lengths):
            part = stored[at : at + length]
            if length == count:
                planes[index] = np.frombuffer(part, np.uint8)
            else:
                self._inflate(part, planes[index])
            at += length
        self._planes.join(planes, items)

    # ------------------------------------------------------------ frames

    def _inflate(self, frame: memoryview, out: Bytes) -> None:
        """Decode one frame that fills ``out`` exactly and has nothing behind it."""
        _check_frame(frame, out.size)
        try:
            with self._contexts.decompressor.stream_reader(frame) as reader:
                filled = reader.readinto(out.data)
        except zstandard.ZstdError as error:
            raise CorruptBlock(f"a damaged frame: {error}") from error
        if filled != out.size:
            raise CorruptBlock(f"a frame of {filled} bytes for {out.size}")


def _plane_bytes(size: int, item_bytes: int) -> int:
    """Return the length of a plane in bytes; bytes that are no whole number of items are one plane."""
    if item_bytes not in (1, 2, 4):
        raise ValueError(f"item_bytes={item_bytes}: must be 1, 2 or 4")
    return size if size % item_bytes else size // item_bytes


def _check_frame(frame: memoryview, size: int) -> None:
    """Raise :class:`CorruptBlock` unless this is one whole frame that says it holds ``size`` bytes, and no more.

    Read here are the frame's header and those of its blocks, before memory is taken: zstd then decodes it in one pass
    into the room that it is given and asks for no window.
    """
    try:
        if bytes(frame[:4]) != _MAGIC:
            raise CorruptBlock("no zstd frame")
        said = zstandard.get_frame_parameters(frame)
        at = zstandard.frame_header_size(frame)
    except zstandard.ZstdError as error:
        raise CorruptBlock(f"a damaged frame: {error}") from error
    if said.content_size != size or said.window_size > max(1024, 2 * size):
        raise CorruptBlock(f"a frame of {said.content_size} bytes, window {said.window_size}, for {size}")
    if said.dict_id or said.has_checksum:
        raise CorruptBlock("a frame with a dictionary or a checksum")
    last = False
    while not last:
        header = int.from_bytes(frame[at : at + 3], "little")
        last, kind, length = bool(header & 1), header >> 1 & 3, header >> 3
        if at + 3 > len(frame) or kind == 3 or length > _MOST_BLOCK_BYTES:
            raise CorruptBlock("a frame whose blocks do not end")
        at += 3 + (1 if kind == 1 else length)
    if at != len(frame):
        raise CorruptBlock(f"a frame of {at} bytes in {len(frame)}")
