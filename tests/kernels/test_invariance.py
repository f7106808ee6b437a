"""The engine's central promise, at its root: in float32 a row's bits depend on nothing but the row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kimicore.kernels.gated_act import native as native_gated_act
from kimicore.kernels.linear import native as native_linear
from kimicore.kernels.linear.floor import PROBED_ROWS, row_floor, row_invariant_linear
from kimicore.kernels.paged_attention import native, tiled
from kimicore.kernels.rms_norm import native as native_rms_norm

from .cases import implementations, paged

SHAPES = [((9, 3), 64, None), ((4, 1), 256, 100), ((7, 7), 40, 700), ((6, 2), 33, 300)]
PARTS = [1, 7, 64, 333]


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Run with this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "dim", "window"), SHAPES)
@pytest.mark.parametrize("op", implementations(native.load()))
def test_attention_is_the_same_in_every_chunk(
    op: Any, heads: tuple[int, int], dim: int, window: int | None, dtype: torch.dtype
) -> None:
    """Native attention gives a query the same bits whole, in chunks, alone, in a batch and with any threads."""
    tokens = 1100
    before = torch.get_num_threads()
    case = paged([(tokens, tokens)], heads, dim, 16, dtype)
    how = {"scale": dim**-0.5, "window": window}
    torch.set_num_threads(1)
    whole = op(*case.call, **how)
    torch.set_num_threads(before)
    assert torch.equal(op(*case.call, **how), whole)
    for size in PARTS:
        starts = range(0, tokens, size) if size > 1 else (0, 5, 99, 255, 256, 257, 511, 1023, tokens - 1)
        for start in starts:
            stop = min(start + size, tokens)
            assert torch.equal(op(*case.only(0, start, stop - start), **how), whole[start:stop]), (start, stop)
    ends = torch.tensor([1, 17, 256, 257, 600, tokens], dtype=torch.int32)
    rows = torch.arange(len(ends) + 1, dtype=torch.int32)
    batch = op(case.q[ends.long() - 1], case.kv, 1, case.table.repeat(len(ends), 1), rows, ends, **how)
    assert torch.equal(batch, whole[ends.long() - 1])


def test_tiled_attention_is_the_same_in_every_chunk() -> None:
    """Without a compiler, too, float32 attention gives a query the same bits in any chunk and any batch."""
    case = paged([(600, 600), (90, 40)], (6, 2), 48, 16, torch.float32)
    whole = tiled.paged_attention(*case.call, scale=0.2)
    for start, count in ((0, 1), (0, 7), (5, 40), (255, 1), (256, 1), (250, 300), (599, 1)):
        alone = tiled.paged_attention(*case.only(0, start, count), scale=0.2)
        assert torch.equal(alone, whole[start : start + count]), (start, count)
    assert torch.equal(tiled.paged_attention(*case.only(1, 10, 30), scale=0.2), whole[610:640])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("outs", "depth"), [(96, 576), (201, 77), (5, 1536), (13, 3), (20, 9000)])
@pytest.mark.parametrize("op", implementations(native_linear.load(torch.float32)))
def test_native_product_is_the_same_for_any_number_of_rows(op: Any, outs: int, depth: int) -> None:
    """A row of the native float32 product has the same bits whatever stands above, below and how much of it."""
    random = torch.Generator().manual_seed(3)
    x, weight = torch.randn(512, depth, generator=random), torch.randn(outs, depth, generator=random)
    whole = op(x, weight)
    for rows in PROBED_ROWS:
        assert torch.equal(op(x[:rows], weight), whole[:rows]), rows
        assert torch.equal(op(x[-rows:], weight), whole[-rows:]), rows


def test_padded_product_is_the_same_for_any_number_of_rows() -> None:
    """torch's float32 product, padded to the measured floor, gives a row the same bits at every number of rows."""
    random = torch.Generator().manual_seed(3)
    shape = (96, 576)
    floor = row_floor([shape], torch.float32)
    if floor is None:
        pytest.skip("torch's product has no floor on this machine; describe() says so")
    op = row_invariant_linear(floor)
    x, weight = torch.randn(512, 576, generator=random), torch.randn(shape, generator=random)
    whole = op(x, weight)
    assert whole.shape == (512, 96)
    for rows in PROBED_ROWS:
        assert torch.equal(op(x[:rows], weight), whole[:rows]), rows


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("op", implementations(native_rms_norm.load()))
@pytest.mark.parametrize("width", [576, 77])
def test_norm_is_the_same_in_every_batch(op: Any, width: int) -> None:
    """A row's normalization has the same bits in every batch."""
    random = torch.Generator().manual_seed(3)
    x, residual, weight = (torch.randn(n, width, generator=random) for n in (300, 300, 1))
    whole = op(x, weight[0], 1e-6, residual)
    for start, stop in ((0, 1), (7, 12), (299, 300), (1, 300)):
        part = op(x[start:stop], weight[0], 1e-6, residual[start:stop])
        assert torch.equal(part[0], whole[0][start:stop]) and torch.equal(part[1], whole[1][start:stop])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("op", implementations(native_gated_act.load()))
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_activation_is_the_same_in_every_batch(op: Any, kind: str) -> None:
    """A row's activation has the same bits in every batch, for a width that fills no vector as well."""
    x = 3 * torch.randn(300, 2 * 77, generator=torch.Generator().manual_seed(3))
    whole = op(x, kind)
    for start, stop in ((0, 1), (7, 12), (299, 300), (1, 300)):
        assert torch.equal(op(x[start:stop], kind), whole[start:stop])
