"""Byte planes: native and reference against slices of bytes, at any size and alignment, and how even bytes are."""

from __future__ import annotations

import math
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
from kimicore.kernels.byte_planes import native, reference, select_byte_planes

from .cases import implementations

Bytes = NDArray[np.uint8]
OPS = implementations(native.load(), reference=reference)
NATIVE = native.load()[0]
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

        @staticmethod
        def join(planes: Sequence[Bytes], items: Bytes) -> None:
            reference.join(planes[::-1], items)

    monkeypatch.setattr(native, "load", lambda: (Swapped(), "compiled"))
    wrong = byte_planes.select_byte_planes()
    assert wrong.implementation == "numpy" and "differ" in wrong.why
