"""The codec gives back the bytes that it was given, and refuses every payload that it cannot have made."""

from __future__ import annotations

import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kimicore.errors import ConfigError
from kimicore.kernels.byte_planes import select_byte_planes
from kimicore.kv import codec as codec_module
from kimicore.kv.codec import CODECS, Codec, CorruptBlock, Encoded

AUTO, PLAIN = Codec(), {name: Codec(name) for name in CODECS}
NATIVE_AUTO = "auto" if AUTO._planes.implementation == "native" else "planes-packed"  # what auto is with a compiler
FRAME = zstandard.ZstdCompressor(level=1).compress
ITEM_BYTES = st.sampled_from([1, 2, 4])
GUARD = 64


def noise(size: int, seed: int = 1) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def values(dtype: torch.dtype, count: int = 50_000, seed: int = 1) -> bytes:
    """Numbers that are spread as keys and values are, as the bytes of ``dtype``; int8 is scaled to its range."""
    drawn = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    if dtype == torch.int8:
        drawn = (drawn * 127 / drawn.abs().max()).round()
    return drawn.to(dtype).view(torch.uint8).numpy().tobytes()


def decoded(codec: int, payload: bytes | memoryview, size: int, item_bytes: int, by: Codec = AUTO) -> bytes:
    """Decode into the middle of a guarded buffer, poisoned before, whether or not the payload is refused."""
    buffer = bytearray(b"\xa5" * (size + 2 * GUARD))
    try:
        by.decode(codec, payload, memoryview(buffer)[GUARD : GUARD + size], item_bytes)
    finally:
        assert buffer[:GUARD] == buffer[GUARD + size :] == b"\xa5" * GUARD, "written outside of the output"
    return bytes(buffer[GUARD : GUARD + size])


def refused(codec: int, payload: bytes, size: int, item_bytes: int = 2) -> None:
    with pytest.raises(CorruptBlock):
        decoded(codec, payload, size, item_bytes)


# ------------------------------------------------------------ there and back


@pytest.mark.parametrize("name", CODECS)
@given(
    data=st.one_of(
        st.binary(max_size=300), st.builds(lambda part, n: part * n, st.binary(max_size=40), st.integers(0, 2000))
    ),
    item_bytes=ITEM_BYTES,
)
def test_any_bytes_come_back(name: str, data: bytes, item_bytes: int) -> None:
    """Whatever the bytes, the name and the size of an item, decoding gives back what was encoded."""
    encoded = PLAIN[name].encode(memoryview(data), item_bytes)
    assert decoded(encoded.codec, encoded.payload, len(data), item_bytes) == data


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("count", [1, 63, 8192, 184_321, 1_500_000])
def test_blocks_come_back(name: str, dtype: torch.dtype, count: int) -> None:
    """Blocks of every type come back, from views of memory that begins anywhere, to beyond zstd's window."""
    data, size = values(dtype, count), dtype.itemsize
    held = bytearray(b"\0" + data)
    encoded = PLAIN[name].encode(memoryview(held)[1:], size)
    assert isinstance(encoded.payload, bytes) and bytes(held) == b"\0" + data
    assert decoded(encoded.codec, memoryview(b"\0" + encoded.payload)[1:], len(data), size) == data


def test_blocks_of_a_tensor() -> None:
    """Memory of a tensor is encoded where it lies, and decoded into."""
    arena = torch.randn(3, 4000).to(torch.bfloat16)
    views = [memoryview(one.view(torch.uint8).numpy()) for one in arena]
    encoded = AUTO.encode(views[1], 2)
    AUTO.decode(encoded.codec, encoded.payload, views[2], 2)
    assert torch.equal(arena[1].view(torch.int16), arena[2].view(torch.int16)) and encoded.codec in (2, 3)


@pytest.mark.parametrize(
    ("dtype", "codecs", "least_ratio"),
    [(torch.bfloat16, (1, 2, 3), 1.4), (torch.float16, (1, 2, 3), 1.1), (torch.int8, (1, 1, 1), 1.1)],
    ids=str,
)
def test_what_shrinks(dtype: torch.dtype, codecs: tuple[int, ...], least_ratio: float) -> None:
    """Bytes that are spread as keys and values shrink by what their exponents carry, under ``auto`` nearly as zstd's
    entropy coding does it.
    """
    data = values(dtype)
    sizes = {}
    for name, number in zip(("zstd", "planes-zstd", NATIVE_AUTO), codecs, strict=True):
        encoded = PLAIN[name].encode(memoryview(data), dtype.itemsize)
        assert encoded.codec == number
        sizes[name] = len(encoded.payload)
    assert sizes[NATIVE_AUTO] * least_ratio < len(data)
    assert sizes[NATIVE_AUTO] <= 1.04 * min(sizes.values())


def test_noise_planes_are_stored_as_they_are() -> None:
    """The low bytes of bfloat16 lie in the payload as they are, behind the lengths; the high ones are one frame, or
    packed.
    """
    data = values(torch.bfloat16)
    packed = PLAIN["planes-packed"].encode(memoryview(data), 2).payload
    (low,) = struct.unpack_from("<I", packed)
    assert packed[8 : 8 + low] == data[::2]
    assert packed[8 + low :] == PLAIN["planes-packed"]._planes.pack(np.frombuffer(data[1::2], np.uint8), low)
    payload = PLAIN["planes-zstd"].encode(memoryview(data), 2).payload
    low, high = struct.unpack_from("<2I", payload)
    assert low == len(data) // 2 and payload[8 : 8 + low] == data[::2]
    assert zstandard.decompress(payload[8 + low :]) == data[1::2] and high == len(payload) - 8 - low


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("item_bytes", [1, 2, 4])
def test_noise_is_raw(name: str, item_bytes: int) -> None:
    """What does not shrink by 1/64 is stored raw, whatever the codec."""
    for size in (0, 1, 4, 100_000):
        data = noise(size)
        assert PLAIN[name].encode(memoryview(data), item_bytes) == Encoded(0, data)
    almost = noise(100_000) + bytes(1000)
    assert PLAIN[name].encode(memoryview(almost), item_bytes).codec == 0


def test_auto_leaves_a_small_gain() -> None:
    """A plane that would shrink by 3 % is coded by ``planes-zstd`` and not by ``auto``."""
    drawn = np.random.default_rng(1).normal(0.0, 60.0, 100_000)
    data = drawn.clip(-127, 127).astype(np.int8).tobytes()
    assert 0.95 < len(PLAIN["planes-zstd"].encode(memoryview(data), 1).payload) / len(data) < 0.98
    assert AUTO.encode(memoryview(data), 1) == Encoded(0, data)


def test_wrong_settings() -> None:
    """A name or level that there is not is a ConfigError that names it; an item has 1, 2 or 4 bytes."""
    for name, level in (("lz4", 1), ("", 1), ("zstd", 0), ("zstd", 23), ("zstd", True), ("zstd", 1.5)):
        with pytest.raises(ConfigError, match="level" if name == "zstd" else "codec"):
            Codec(name, level)  # type: ignore[arg-type]
    for item_bytes in (0, 3, 8):
        with pytest.raises(ValueError, match="item_bytes"):
            AUTO.encode(memoryview(b"1234"), item_bytes)
    assert Codec("zstd", 9).level == 9


@pytest.mark.parametrize("name", ["auto", "planes-zstd", "planes-packed"])
def test_the_same_without_a_compiler(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codecs with and without native planes read each other's payloads; those that were named are the same bytes, and
    ``auto`` packs where that is fast.
    """
    monkeypatch.setattr(codec_module, "select_byte_planes", lambda: select_byte_planes(use_native=False))
    plain, data = Codec(name), values(torch.bfloat16)
    assert plain._planes.implementation == "numpy"
    there, back = PLAIN[name].encode(memoryview(data), 2), plain.encode(memoryview(data), 2)
    assert there == back or (name == "auto" and (there.codec, back.codec) == (3, 2))
    for one in (there, back):
        for by in (plain, PLAIN[name]):
            assert decoded(one.codec, one.payload, len(data), 2, by) == data


# ------------------------------------------------------------ what cannot be


def block(last: int, kind: int, size: int) -> bytes:
    """The header of a block in a frame: kind 0 is stored, 1 a repeated byte, 3 reserved."""
    return struct.pack("<I", size << 3 | kind << 1 | last)[:3]


def frames() -> dict[str, bytes]:
    """Payloads of codec 1 for 1,000 bytes that look right at first."""
    data = bytes(range(100)) * 10
    good = FRAME(data)
    with_checksum = zstandard.ZstdCompressor(write_checksum=True).compress(data)
    without_size = zstandard.ZstdCompressor(write_content_size=False).compress(data)
    magic, huge, size = b"\x28\xb5\x2f\xfd", struct.pack("<Q", 1 << 42), struct.pack("<H", 1000 - 256)
    raw = block(1, 0, 1000) + data
    return {
        "nothing": b"",
        "magic": magic,
        "shorter": FRAME(data[:-1]),
        "longer": FRAME(data + b"1"),
        "two": FRAME(data[:500]) + FRAME(data[500:]),
        "and an empty frame": good + FRAME(b""),
        "trailing": good + b"\0",
        "skippable": struct.pack("<II", 0x184D2A50, 1000) + data,
        "skippable before": struct.pack("<II", 0x184D2A50, 4) + b"1234" + good,
        "checksum": with_checksum,
        "no size": without_size,
        "other format": good[1:],
        "dictionary": magic + bytes([0x61, 7]) + size + raw,
        "terabytes": magic + bytes([0xE0]) + huge + raw,
        "terabytes, window": magic + bytes([0xC0, 0xA8]) + huge + raw,
        "window of 2 GiB": magic + bytes([0x40, 21 << 3]) + size + raw,
        "reserved bit": magic + bytes([0x68]) + size + raw,
        "reserved block": magic + bytes([0x60]) + size + block(1, 3, 1000) + data,
        "RLE of too many": magic + bytes([0x60]) + size + block(1, 1, 1001) + b"1",
        "many empty blocks": magic + bytes([0x60]) + size + block(0, 0, 0) * 5000,
    }


def test_the_forged_frames_are_nearly_right() -> None:
    """The frame that the forged ones vary is one that is decoded."""
    data = bytes(range(100)) * 10
    header = b"\x28\xb5\x2f\xfd\x60" + struct.pack("<H", 1000 - 256)
    assert decoded(1, header + block(1, 0, 1000) + data, 1000, 2) == data
    assert decoded(1, header + block(1, 1, 1000) + b"1", 1000, 2) == b"1" * 1000


@pytest.mark.parametrize("kind", list(frames()))
def test_forged_frames_are_refused(kind: str) -> None:
    """A frame of another size, of none, with anything behind it or unlike those that are written is no block."""
    frame = frames()[kind]
    refused(1, frame, 1000)
    plane = bytes(1000)
    refused(2, struct.pack("<2I", len(frame), 1000) + frame + plane, 2000)
    refused(2, struct.pack("<2I", 1000, len(frame)) + plane + frame, 2000)
    refused(3, struct.pack("<2I", 1000, len(frame)) + plane + frame, 2000)


@pytest.mark.parametrize("kind", ["terabytes", "terabytes, window", "window of 2 GiB", "longer", "trailing"])
def test_claims_are_refused_before_memory_is_taken(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a frame claims is read from its header: zstd is never asked to decode one that claims too much."""
    codec, asked = Codec(), []

    class Decompressor:
        def stream_reader(self, frame: memoryview) -> Any:
            asked.append(frame)
            raise zstandard.ZstdError("asked")

    codec._contexts.decompressor = Decompressor()  # type: ignore[assignment]
    with pytest.raises(CorruptBlock):
        codec.decode(1, frames()[kind], memoryview(bytearray(1000)), 2)
    assert asked == []
    with pytest.raises(CorruptBlock, match="asked"):
        codec.decode(1, FRAME(bytes(1000)), memoryview(bytearray(1000)), 2)


def test_wrong_lengths_are_refused() -> None:
    """Raw bytes and lengths of planes that do not add up are no block, nor is a codec that there is not."""
    for size in (0, 999, 1001):
        refused(0, bytes(size), 1000)
    planes = bytes(1000)
    for lengths in ((500, 499), (501, 499), (500, 501), (1000, 0), (0, 1000), (2**32 - 1, 1001), (0, 0)):
        for codec in (2, 3):
            refused(codec, struct.pack("<2I", *lengths) + planes, 1000)
    for codec in (2, 3):
        assert decoded(codec, struct.pack("<2I", 500, 500) + planes, 1000, 2) == planes
    frame = FRAME(noise(500))  # longer than what it holds, so never kept instead of the plane
    refused(2, struct.pack("<2I", len(frame), 500) + frame + planes[:500], 1000)
    for item_bytes, size in ((1, 1000), (2, 1001), (4, 1002)):  # bytes of one plane are never of codec 2
        for codec in (2, 3):
            refused(codec, struct.pack("<I", size) + bytes(size), size, item_bytes)
            refused(codec, FRAME(bytes(size)), size, item_bytes)
    for codec in (-1, 4, 255):
        refused(codec, planes, 1000)
    for codec in (1, 2, 3):
        for payload in (b"", FRAME(b""), bytes(8), bytes(3)):
            refused(codec, payload, 0)


@given(
    codec=st.integers(0, 4),
    payload=st.one_of(
        st.binary(max_size=200),
        st.builds(b"\x28\xb5\x2f\xfd".__add__, st.binary(max_size=100)),
        st.builds(lambda a, b: struct.pack("<II", 40, len(a) + 4) + b[:40] + b"\x28\xb5\x2f\xfd" + a,
                  st.binary(max_size=60), st.binary(min_size=40, max_size=40)),
    ),
    size=st.sampled_from([0, 1, 2, 79, 80, 300, 100_000]),
    item_bytes=ITEM_BYTES,
)  # fmt: skip
def test_any_payload_is_a_block_or_corrupt(codec: int, payload: bytes, size: int, item_bytes: int) -> None:
    """No payload raises anything but CorruptBlock, and none writes outside of the output."""
    try:
        decoded(codec, payload, size, item_bytes)
    except CorruptBlock:
        return
    assert codec != 0 or len(payload) == size


VALID = [
    (PLAIN[name].encode(memoryview(data := values(dtype, count)), dtype.itemsize), data, dtype.itemsize)
    for name, dtype, count in (
        ("zstd", torch.bfloat16, 3000),
        ("planes-zstd", torch.bfloat16, 3000),
        ("planes-packed", torch.bfloat16, 9000),
        ("planes-zstd", torch.float32, 200_000),
        ("planes-packed", torch.float32, 200_000),
        ("planes-zstd", torch.int8, 9000),
    )
]


@given(valid=st.sampled_from(VALID), draw=st.data())
def test_damaged_payloads(valid: tuple[Encoded, bytes, int], draw: st.DataObject) -> None:
    """A payload that is cut off or goes on is refused; one with changed bytes is refused or gives as many bytes; the
    right one is decoded afterwards.
    """
    encoded, data, item_bytes = valid
    payload = encoded.payload
    cut = draw.draw(st.integers(0, len(payload) - 1))
    refused(encoded.codec, payload[:cut], len(data), item_bytes)
    refused(encoded.codec, payload + draw.draw(st.binary(min_size=1, max_size=20)), len(data), item_bytes)
    refused(encoded.codec, payload, len(data) + draw.draw(st.sampled_from([-4, -1, 1, 4, 400])), item_bytes)
    changed = bytearray(payload)
    for _ in range(draw.draw(st.integers(1, 3))):
        at = draw.draw(st.one_of(st.integers(0, len(payload) - 1), st.integers(0, 30)))
        changed[at] ^= draw.draw(st.integers(1, 255))
    with suppress(CorruptBlock):
        assert len(decoded(encoded.codec, bytes(changed), len(data), item_bytes)) == len(data)
    assert decoded(encoded.codec, payload, len(data), item_bytes) == data


# ------------------------------------------------------------ threads


def test_one_codec_serves_many_threads() -> None:
    """Threads that encode and decode blocks of different sizes with one codec at once get their own back."""
    codec = Codec()

    def turn(seed: int) -> bool:
        data = values(torch.bfloat16, 20_000 + 7000 * seed, seed)
        for _ in range(20):
            encoded = codec.encode(memoryview(data), 2)
            if encoded.codec not in (2, 3) or decoded(encoded.codec, encoded.payload, len(data), 2, codec) != data:
                return False
        return True

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(turn, range(6)))


@pytest.mark.parametrize("way", ["encode", "decode"])
def test_the_interpreter_goes_on(way: str) -> None:
    """While a thread encodes or decodes one large block, another runs: the lock is not held through any of the work."""
    data = values(torch.bfloat16, 8_000_000) * 4  # 64 MB: tens of milliseconds of work
    encoded, out = AUTO.encode(memoryview(data), 2), memoryview(bytearray(len(data)))
    span = [0.0, 0.0]

    def work() -> None:
        span[0] = time.perf_counter()
        if way == "encode":
            AUTO.encode(memoryview(data), 2)
        else:
            AUTO.decode(encoded.codec, encoded.payload, out, 2)
        span[1] = time.perf_counter()

    shares = []
    for _ in range(5):  # a busy machine may hold one of them up
        thread = threading.Thread(target=work)
        ticks = [time.perf_counter()]
        thread.start()
        while thread.is_alive():
            ticks.append(time.perf_counter())
        during = [span[0], *(one for one in ticks if span[0] < one < span[1]), span[1]]
        shares.append(max(np.diff(during)) / (span[1] - span[0]))
        if shares[-1] < 0.5:
            return
    pytest.fail(f"the longest pauses of the other thread, as shares of the work: {shares}")
