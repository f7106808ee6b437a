"""Matrices of GGUF files keep their codes: what is packed means exactly what the file says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kimicore.errors import ModelLoadError
from kimicore.kernels.packed_linear.reference import unpack
from kimicore.model.dequantize import dequantize
from kimicore.model.gguf_source import GGUFSource
from kimicore.model.packed.gguf_blocks import pack_blocks

from .coded_gguf import CODED, blocks, coded_gguf
from .forge import tiny_gguf

ODD = [0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFE01]
"""Float16: zeros, subnormals, the largest, infinite, no numbers."""


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether two float32 tensors have the same bits, one NaN being like another."""
    numbers = ~theirs.isnan()
    bits = ours.view(torch.int32)[numbers], theirs.view(torch.int32)[numbers]
    return torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(*bits)


@pytest.mark.parametrize("name", CODED)
@given(
    seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 9), per_row=st.integers(1, 5), odd=st.sampled_from([None, *ODD])
)
def test_packed_blocks_mean_the_same_bits(name: str, seed: int, rows: int, per_row: int, odd: int | None) -> None:
    """Any blocks, those with zero, subnormal, infinite and NaN scales included, unpack to the bits of dequantize."""
    kind = CODED[name]
    raw = blocks(kind, rows, per_row, seed, odd)
    shape = (rows, per_row * kind.block)
    packed = pack_blocks(raw, kind, shape)
    assert packed is not None
    expected = torch.from_numpy(dequantize(raw, kind)).view(shape)
    assert same_bits(unpack(packed, torch.float32), expected)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed % 1000))
    moved = pack_blocks(raw, kind, shape, order)
    assert moved is not None
    assert same_bits(unpack(moved, torch.float32)[order], expected)


@pytest.mark.parametrize("name", CODED)
def test_packed_matrices_take_what_their_blocks_take(name: str) -> None:
    """A matrix of 4 to 8 bits takes at most 3 percent more memory packed than in its file."""
    kind = CODED[name]
    packed = pack_blocks(blocks(kind, 64, 1024 // kind.block, 0, None), kind, (64, 1024))
    assert packed is not None
    stored = 64 * 1024 // kind.block * kind.block_bytes
    most = {"Q2_K": 2.0, "Q3_K": 1.4}.get(name, 1.03)  # two and three bits lie in four
    assert stored <= packed.weight_bytes <= most * stored


def test_large_matrices_are_packed_in_pieces() -> None:
    """A matrix that is converted a few rows at a time is the same as its rows are alone."""
    kind = CODED["Q6_K"]
    raw = blocks(kind, 1100, 8, 3, None)
    packed = pack_blocks(raw, kind, (1100, 2048))
    assert packed is not None
    assert same_bits(unpack(packed, torch.float32), torch.from_numpy(dequantize(raw, kind)).view(1100, 2048))


@pytest.mark.parametrize("name", CODED)
def test_packed_and_read_agree_through_a_file(name: str, tmp_path: Path) -> None:
    """Every matrix of a file, queries and keys with their rows put in order as well, is packed as it is read."""
    source = GGUFSource(coded_gguf(tmp_path / "m.gguf", name))
    seen = 0
    for key in source.names():
        packed, plain = source.packed(key), source.read(key, torch.float32)
        if len(source.shape(key)) == 1:
            assert packed is None
            continue
        assert packed is not None
        assert packed.shape == source.shape(key)
        assert same_bits(unpack(packed, torch.float32), plain), key
        seen += 1
    assert seen == 8


def test_floats_are_not_packed(tmp_path: Path) -> None:
    """A matrix of floats has no codes; a name that is not there is refused as reading refuses it."""
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny_gguf())
    source = GGUFSource(path)
    assert all(source.packed(key) is None for key in source.names())
    with pytest.raises(ModelLoadError, match="tensor 'x': is not in the file"):
        source.packed("x")
