"""Quantized weights come back exactly as ggml's own package gives them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimicore.errors import ModelLoadError
from kimicore.model.dequantize import QUANT_TYPES, dequantize
from kimicore.model.gguf import read_gguf

from .forge import header, padded, tensor


def _reference(raw: np.ndarray, number: int) -> np.ndarray:
    kind = gguf.GGMLQuantizationType(number)
    view = {gguf.GGMLQuantizationType.F32: np.float32, gguf.GGMLQuantizationType.F16: np.float16}.get(kind)
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(raw if view is None else raw.view(view), kind).astype(np.float32).reshape(-1)


@pytest.mark.parametrize("number", list(QUANT_TYPES), ids=[kind.name for kind in QUANT_TYPES.values()])
@given(seed=st.integers(0, 2**32 - 1), blocks=st.integers(1, 70))
def test_random_blocks_are_bit_equal(number: int, seed: int, blocks: int) -> None:
    """Any bytes, NaN and infinite scales included, give the bits that ggml's package gives."""
    kind = QUANT_TYPES[number]
    raw = np.random.default_rng(seed).integers(0, 256, (blocks, kind.block_bytes), dtype=np.uint8)
    ours, theirs = dequantize(raw.reshape(-1), kind), _reference(raw, number)
    assert ours.dtype == np.float32
    numbers = ~np.isnan(theirs)
    assert np.array_equal(ours.view(np.uint32)[numbers], theirs.view(np.uint32)[numbers])
    assert np.isnan(ours[~numbers]).all()


@pytest.mark.parametrize(("number", "name"), [(20, "IQ4_NL"), (23, "IQ4_XS"), (39, "MXFP4"), (26, "I32"), (99, "99")])
def test_other_types_are_refused_by_name(number: int, name: str, tmp_path: Path) -> None:
    """A type that cannot be read is refused with its name and the names of those that can."""
    path = tmp_path / "model.gguf"
    path.write_bytes(padded(header([], [tensor("x", [256], number, 0)])) + bytes(4096))
    with pytest.raises(ModelLoadError, match=rf"{name} is not supported; supported are F32.*Q6_K"):
        read_gguf(path)
