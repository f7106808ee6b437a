"""Byte planes: native and reference against slices of bytes, at any size and alignment; packed; how even they are."""

from __future__ import annotations

import math
import os
import platform
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kimicore.kernels import byte_planes
from kimicore.kernels.build import build_library
from kimicore.kernels.byte_planes import native, reference, select_byte_planes

from .cases import implementations

Bytes = NDArray[np.uint8]
NATIVE = native.load()[0]


def portable() -> dict[str, Any]:
    """Return the native operations as a machine without wide vectors has them, where there is a compiler for that."""
    if NATIVE is None or platform.machine() != "x86_64":
        return {}  # elsewhere the native ones are those
    narrow = f"{os.environ.get('CXX', 'c++')} -mno-avx512f -mno-avx2 -mno-bmi2"
    library = build_library(native.SOURCE, environ={**os.environ, "CXX": narrow})
    return {} if library.handle is None else {"portable": native.bound(library.handle)}


PORTABLE = portable()
OPS = implementations(native.load(), reference=reference, **PORTABLE)
COUNTS = [0, 1, 3, 31, 64, 65, 1000, 4099, 184_320]
GUARD = 256


def noise(seed: int, size: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


class Guarded:
    """An output at an odd address whose content is poison, between two guards."""

    def __init__(self, poison: int, *shape: int) -> None:
        self.size, self.poison = math.prod(shape), poison
        self.buffer = np.full(self.size + 2 * GUARD + 1, poison, np.uint8)
        self.array = self.buffer[GUARD + 1 : GUARD + 1 + self.size].reshape(shape)

    def check(self) -> None:
        outside = np.concatenate((self.buffer[: GUARD + 1], self.buffer[GUARD + 1 + self.size :]))
        assert (outside == self.poison).all(), "written outside of the output"


def apart(planes: Sequence[Bytes]) -> list[Bytes]:
    """Return copies of the planes that lie apart, at odd addresses."""
    return [np.concatenate((noise(9, 2 * i + 1), plane))[2 * i + 1 :] for i, plane in enumerate(planes)]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("item_bytes", [1, 2, 4])
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("poison", [0x00, 0xA5])
def test_planes_are_slices(op: Any, item_bytes: int, count: int, poison: int) -> None:
    """Plane i holds byte i of every item, and joining gives the items back; nothing else is written."""
    items = noise(1, item_bytes * count)
    before = items.tobytes()
    split = Guarded(poison, item_bytes, count)
    op.split(items, split.array)
    split.check()
    assert [plane.tobytes() for plane in split.array] == [before[i::item_bytes] for i in range(item_bytes)]
    joined = Guarded(poison, item_bytes * count)
    op.join(apart(split.array), joined.array)
    joined.check()
    assert joined.array.tobytes() == before == items.tobytes()


@pytest.mark.parametrize("op", OPS)
@given(data=st.binary(max_size=600), item_bytes=st.sampled_from([1, 2, 4]), skip=st.integers(0, 7))
def test_round_trip(op: Any, data: bytes, item_bytes: int, skip: int) -> None:
    """Any bytes at any address come back, from input that cannot be written."""
    items = np.frombuffer(b"\0" * skip + data, np.uint8)[skip:]
    items = items[: items.size // item_bytes * item_bytes]
    planes, back = np.empty((item_bytes, items.size // item_bytes), np.uint8), np.empty(items.size, np.uint8)
    op.split(items, planes)
    op.join(list(planes), back)
    assert back.tobytes() == items.tobytes()


def entropy(data: bytes) -> float:
    return sum(-n / len(data) * math.log2(n / len(data)) for n in Counter(data).values())


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("size", [1, 63, 64, 65, 5000, 16_383])
def test_entropy_of_few_bytes_is_exact(op: Any, size: int) -> None:
    """Where a plane is no longer than the sample, the figure is the entropy of all its bytes."""
    plane = (noise(size, size) & noise(size + 1, size)).copy()
    assert op.sampled_bits(plane) == pytest.approx(entropy(plane.tobytes()), abs=1e-9)


@pytest.mark.parametrize("op", OPS)
def test_entropy_is_sampled_from_everywhere(op: Any) -> None:
    """Noise has 8 bits, one value none, nothing none; half of each has the entropy of the mixture, however it lies."""
    size = 1 << 20
    flat = np.full(size, 7, np.uint8)
    assert op.sampled_bits(noise(1, 0)) == op.sampled_bits(flat) == 0.0
    assert 7.95 < op.sampled_bits(noise(1, size)) <= 8.0
    for period in (128, 256, 1024, 4096, size):  # even periods, as heads and tokens have them
        half = np.where(np.arange(size) % period < period // 2, noise(1, size), flat)
        assert op.sampled_bits(half) == pytest.approx(entropy(half.tobytes()), abs=0.1)


@pytest.mark.skipif(NATIVE is None, reason="this machine has no C++ compiler")
@given(size=st.integers(0, 70_000), kept=st.sampled_from([0x00, 0x0F, 0x7F, 0xFF]))
def test_native_samples_as_the_reference_does(size: int, kept: int) -> None:
    """Both look at the same bytes, so both give the same figure."""
    assert NATIVE is not None
    plane = noise(size, size) & np.uint8(kept)
    assert NATIVE.sampled_bits(plane) == pytest.approx(reference.sampled_bits(plane), abs=1e-9)


@pytest.mark.skipif(NATIVE is None, reason="this machine has no C++ compiler")
def test_native_refuses_what_does_not_fit() -> None:
    """Sizes that do not agree, and arrays of other types, with strides or that cannot be written, are refused."""
    assert NATIVE is not None
    good = np.zeros(8, np.uint8)
    with pytest.raises(ValueError, match="fit"):
        NATIVE.split(good, np.zeros((2, 5), np.uint8))
    with pytest.raises(ValueError, match="fit"):
        NATIVE.split(np.zeros(9, np.uint8), np.zeros((3, 3), np.uint8))
    with pytest.raises(ValueError, match="fit"):
        NATIVE.join([good, good], np.zeros(15, np.uint8))
    with pytest.raises(ValueError, match="different"):
        NATIVE.join([good, good[:7]], np.zeros(16, np.uint8))
    with pytest.raises(ValueError, match="contiguous"):
        NATIVE.join([good, np.zeros(16, np.uint8)[::2]], np.zeros(16, np.uint8))
    with pytest.raises(ValueError, match="contiguous"):
        NATIVE.sampled_bits(np.zeros(8, np.int8))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="written"):
        NATIVE.split(good, np.frombuffer(bytes(8), np.uint8).reshape(2, 4))


# ------------------------------------------------------------ packed planes

CHUNK = 4096
MIXTURES = ["one", "few", "spread", "even", "two halves", "noise"]


def mixture(kind: str, size: int, seed: int = 1) -> Bytes:
    """Return bytes of one value, of few, as exponents are spread, of 64 alike, of two kinds of chunk, or noise."""
    rng = np.random.default_rng(seed)
    if kind == "one":
        return np.full(size, 191, np.uint8)
    if kind == "few":
        return rng.choice(np.array([3, 200, 77], np.uint8), size, p=[0.8, 0.15, 0.05])
    if kind == "even":
        return rng.integers(100, 164, size, dtype=np.uint8)
    if kind == "noise":
        return rng.integers(0, 256, size, dtype=np.uint8)
    exponents: Bytes = (rng.normal(0.0, 1.0, size).astype(np.float32).view(np.uint32) >> 24).astype(np.uint8)
    if kind == "two halves":
        exponents[size // 2 :] = rng.integers(0, 256, size - size // 2, dtype=np.uint8)
    return exponents


def put_together(op: Any, planes: Sequence[Bytes]) -> tuple[Bytes, list[int]]:
    """Return planes one behind the other, packed where that is shorter, at an odd address, and their lengths."""
    parts = [op.pack(plane, plane.size - 1) or plane.tobytes() for plane in planes]
    return np.frombuffer(b"?" + b"".join(parts), np.uint8)[1:], list(map(len, parts))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("kind", MIXTURES)
@pytest.mark.parametrize("size", [1, 7, 8, 63, 64, 65, 1000, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 100])
def test_packed_planes_come_back(op: Any, kind: str, size: int) -> None:
    """A plane that is packed comes back, alone and beside one that is not; nothing else is written."""
    plane, other = mixture(kind, size), noise(2, size)
    for planes in ([plane], [other, plane], [plane, plane[::-1].copy()], [other, plane, other, plane]):
        parts, lengths = put_together(op, planes)
        out = Guarded(0xA5, len(planes) * size)
        assert op.join_packed(parts, lengths, out.array)
        out.check()
        assert [out.array[i :: len(planes)].tobytes() for i in range(len(planes))] == [one.tobytes() for one in planes]


@pytest.mark.skipif(NATIVE is None, reason="this machine has no C++ compiler")
@given(
    kind=st.sampled_from(MIXTURES),
    size=st.integers(0, 9000),
    seed=st.integers(0, 1000),
    values=st.integers(1, 256),
)
def test_native_packs_as_the_reference_does(kind: str, size: int, seed: int, values: int) -> None:
    """Both choose the same widths and tables, so a plane has one packed form, and each reads the other's."""
    assert NATIVE is not None
    plane = (mixture(kind, size, seed) % np.uint16(values)).astype(np.uint8)
    most = plane.size + plane.size // CHUNK + 1
    packed = NATIVE.pack(plane, most)
    assert packed == reference.pack(plane, most)
    if packed is None:
        assert not size
        return
    assert len(packed) <= most
    assert NATIVE.pack(plane, len(packed)) == packed and NATIVE.pack(plane, len(packed) - 1) is None
    assert reference.pack(plane, len(packed) - 1) is None
    assert all(op.pack(plane, most) == packed for op in PORTABLE.values())
    if len(packed) < size:
        for op in (NATIVE, reference, *PORTABLE.values()):
            back = np.empty(size, np.uint8)
            assert op.join_packed(np.frombuffer(packed, np.uint8), [len(packed)], back)
            assert back.tobytes() == plane.tobytes()


@pytest.mark.parametrize("op", OPS)
def test_packing_is_near_the_entropy(op: Any) -> None:
    """Exponents as those of normal numbers take at most an eighth more than their entropy; noise takes a byte more."""
    plane = mixture("spread", 64 * CHUNK)
    assert 8 * len(op.pack(plane, plane.size)) < 1.125 * entropy(plane.tobytes()) * plane.size
    assert len(op.pack(noise(1, CHUNK), 2 * CHUNK)) == CHUNK + 1
    assert len(op.pack(mixture("one", CHUNK), CHUNK)) == 4
    assert op.pack(noise(1, 0), 100) is None


def layer(width: int, escapes: int, table: bytes, codes: bytes) -> bytes:
    return bytes([width]) + escapes.to_bytes(2, "little") + table + codes


FORGED = {  # of 40 values
    "nothing": b"",
    "half a head": b"\x02\x00",
    "width 7": layer(7, 0, bytes(3), bytes(30)),
    "width 9": layer(9, 0, bytes(3), bytes(30)),
    "no width but escapes": layer(0, 40, b"", b"") + layer(0, 0, b"\1", b""),
    "table cut": layer(2, 0, b"\1\2\3", b""),
    "codes cut": layer(2, 0, b"\1\2\3\4", bytes(9)),
    "trailing": layer(2, 0, b"\1\2\3\4", bytes(10)) + b"\0",
    "too many escapes": layer(2, 41, b"\1\2\3", b"\xff" * 10) + layer(0, 0, b"\7", b""),
    "escapes that are none": layer(2, 1, b"\1\2\3", bytes(10)) + b"\x08\0",
    "fewer escapes counted": layer(2, 1, b"\1\2\3", b"\xff" * 10) + b"\x08\0",
    "more escapes counted": layer(2, 2, b"\1\2\3", b"\x03" + bytes(9)) + b"\x08\0\0",
    "escapes cut": layer(2, 40, b"\1\2\3", b"\xff" * 10),
    "raw cut": b"\x08" + bytes(38),
    "a layer too many": layer(1, 40, b"\1", b"\xff" * 5) * 3 + layer(0, 0, b"\7", b""),
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("kind", list(FORGED))
def test_forged_layers_are_refused(op: Any, kind: str) -> None:
    """What no packing has made is refused, by itself and behind a good chunk, and nothing else is written."""
    forged = FORGED[kind]
    assert len(forged) < 40
    constant = layer(0, 0, b"\1", b"")
    for before, size in ((b"", 40), (constant, CHUNK + 40)):
        for beside in (b"", noise(1, size).tobytes()):
            part = before + forged
            lengths = [len(part), *([size] if beside else [])]
            out = Guarded(0x5A, len(lengths) * size)
            assert not op.join_packed(np.frombuffer(part + beside, np.uint8), lengths, out.array)
            out.check()


@pytest.mark.parametrize("op", OPS)
def test_a_forged_layer_is_nearly_right(op: Any) -> None:
    """Layers like the forged ones are decoded: codes of 2 bits, three layers in each other, and escapes in between."""
    for forged, wanted in (
        (layer(2, 0, b"\1\2\3\4", b"\xe4" * 10), b"\1\2\3\4" * 10),
        (layer(1, 40, b"\1", b"\xff" * 5) * 2 + layer(0, 0, b"\7", b""), b"\7" * 40),
        (layer(2, 20, b"\1\2\3", b"\xcc" * 10) + layer(0, 0, b"\7", b""), b"\1\7" * 20),
    ):
        out = Guarded(0x5A, 40)
        assert op.join_packed(np.frombuffer(forged, np.uint8), [len(forged)], out.array)
        out.check()
        assert out.array.tobytes() == wanted


@pytest.mark.skipif(NATIVE is None, reason="this machine has no C++ compiler")
@given(data=st.data(), kind=st.sampled_from(MIXTURES[:5]), size=st.integers(30, 5000))
def test_damaged_packs_are_read_alike(data: st.DataObject, kind: str, size: int) -> None:
    """All refuse the same damaged planes, and of those that can still be read they make the same."""
    assert NATIVE is not None
    packed = bytearray(reference.pack(mixture(kind, size), 2 * size) or b"")
    for _ in range(data.draw(st.integers(0, 4))):
        place = data.draw(st.one_of(st.integers(0, len(packed) - 1), st.integers(0, min(12, len(packed) - 1))))
        packed[place] = data.draw(st.one_of(st.integers(0, 255), st.integers(0, 8)))
    changed = bytes(packed[: data.draw(st.one_of(st.just(len(packed)), st.integers(0, len(packed))))])
    changed = (changed + data.draw(st.binary(max_size=2)))[: size - 1]
    by: list[Any] = [NATIVE, reference, *PORTABLE.values()]
    outs = [Guarded(0x5A, size) for _ in by]
    parts = np.frombuffer(changed, np.uint8)
    answers = [op.join_packed(parts, [len(changed)], out.array) for op, out in zip(by, outs, strict=True)]
    assert len(set(answers)) == 1
    for out in outs:
        out.check()
    if answers[0]:
        assert len({out.array.tobytes() for out in outs}) == 1


@pytest.mark.parametrize("op", OPS)
def test_lengths_that_do_not_fit_are_an_error(op: Any) -> None:
    """Lengths that are no planes of these items, or not those of the bytes given, are refused before anything else."""
    items = np.zeros(20, np.uint8)
    for lengths, size in (([10, 9], 20), ([11, 9], 20), ([-1, 10], 9), ([7, 7, 6], 20)):
        with pytest.raises(ValueError, match="bytes"):
            op.join_packed(np.zeros(size, np.uint8), lengths, items)


def test_threads_do_not_meet() -> None:
    """Many threads that split and join at once get their own bytes back."""
    planes_of = select_byte_planes()

    def turn(seed: int) -> bool:
        items, back = noise(seed, 40_000), np.empty(40_000, np.uint8)
        for _ in range(30):
            planes = np.empty((2, 20_000), np.uint8)
            planes_of.split(items, planes)
            planes_of.join(list(planes), back)
        return np.array_equal(items, back)

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(turn, range(6)))


def test_choice_tells_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler, when told to, and where the native results are wrong, numpy serves, and it is said why."""
    chosen = select_byte_planes()
    assert chosen.implementation == ("numpy" if NATIVE is None else "native") and chosen.why
    plain = select_byte_planes(use_native=False)
    assert plain.implementation == "numpy" and "turned off" in plain.why and plain.join is reference.join
    monkeypatch.setattr(native, "load", lambda: (None, "no compiler"))
    assert byte_planes.select_byte_planes().why == "no compiler"

    class Swapped:
        """Takes the high bytes for the low ones."""

        sampled_bits = staticmethod(reference.sampled_bits)
        split = staticmethod(reference.split)
        pack = staticmethod(reference.pack)
        join_packed = staticmethod(reference.join_packed)

        @staticmethod
        def join(planes: Sequence[Bytes], items: Bytes) -> None:
            reference.join(planes[::-1], items)

    class Forgetful:
        """Unpacks nothing."""

        sampled_bits = staticmethod(reference.sampled_bits)
        split = staticmethod(reference.split)
        join = staticmethod(reference.join)
        pack = staticmethod(reference.pack)

        @staticmethod
        def join_packed(parts: Bytes, lengths: Sequence[int], items: Bytes) -> bool:
            return bool(parts.size and lengths and items.size)

    for bad in (Swapped(), Forgetful()):
        monkeypatch.setattr(native, "load", lambda bad=bad: (bad, "compiled"))
        wrong = byte_planes.select_byte_planes()
        assert wrong.implementation == "numpy" and "differ" in wrong.why
