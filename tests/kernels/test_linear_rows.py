"""The native bfloat16 product: the same bits of a row in every batch that it serves, whatever else it is given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kimicore.kernels.linear import native

from .cases import guarded_outputs, implementations
from .tolerances import assert_close

ROWS = (*range(1, 34), 47, 48, 63, 64, 65, 100, 127, native.FEW_ROWS)
OPS = implementations(native.load(torch.bfloat16))


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Run with this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("outs", "depth"), [(96, 576), (203, 77), (6, 1536), (13, 3), (40, 9000)])
@pytest.mark.parametrize("op", OPS)
def test_row_of_bfloat16_product_is_the_same_in_every_batch_served(
    op: Any, outs: int, depth: int, biased: bool
) -> None:
    """A row of the native bfloat16 product has the same bits alone as among any number of rows that is served."""
    random = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(n, depth, generator=random).bfloat16() for n in (native.FEW_ROWS, outs))
    bias = torch.randn(outs, generator=random).bfloat16() if biased else None
    whole = op(x, weight, bias)
    for rows in ROWS:
        assert torch.equal(op(x[:rows], weight, bias), whole[:rows]), rows
        assert torch.equal(op(x[-rows:], weight, bias), whole[-rows:]), rows


@pytest.mark.parametrize(("outs", "depth"), [(203, 77), (64, 32), (70, 1000), (1, 5), (4, 1)])
@pytest.mark.parametrize("op", OPS)
def test_bfloat16_product_is_near_the_exact_one_and_stays_in_its_output(op: Any, outs: int, depth: int) -> None:
    """Every number of rows gives the float64 product within the table's bounds, from strided rows too."""
    random = torch.Generator().manual_seed(5)
    x = torch.randn(native.FEW_ROWS, depth + 9, generator=random).bfloat16()[:, 4 : depth + 4]
    weight = (torch.randn(outs, depth + 5, generator=random) / depth**0.5).bfloat16()[:, :depth]
    exact = x.double() @ weight.double().T
    for rows in ROWS:
        with guarded_outputs():
            found = op(x[:rows], weight)
        assert_close("linear", found, exact[:rows], torch.bfloat16)


@pytest.mark.parametrize("op", OPS)
def test_bad_row_of_bfloat16_product_harms_no_other(op: Any) -> None:
    """A row of NaN and infinities leaves the bits of every other row as they are, and shows in its own."""
    random = torch.Generator().manual_seed(7)
    x, weight = (torch.randn(n, 100, generator=random).bfloat16() for n in (23, 37))
    clean = op(x, weight)
    for bad in (0, 3, 4, 11, 22):
        spoiled = x.clone()
        spoiled[bad, 5], spoiled[bad, 6] = torch.nan, torch.inf
        found = op(spoiled, weight)
        others = torch.arange(23) != bad
        assert torch.equal(found[others], clean[others]) and found[bad].isnan().all()
