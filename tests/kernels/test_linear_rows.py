"""The native 16-bit products: the same bits of a row in every batch that it serves, whatever else it is given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from kimicore.kernels.linear import native
from kimicore.kernels.linear.shapes import row_step, whole_rows
from kimicore.kernels.registry import select_ops

from .cases import guarded_outputs, implementations
from .tolerances import assert_close

HALVES = (torch.bfloat16, torch.float16)
OPS = [
    pytest.param(op.values[0], dtype, id=f"{op.id}-{dtype}")
    for dtype in HALVES
    for op in implementations(native.load(dtype))
]


def served(dtype: torch.dtype) -> list[int]:
    """Numbers of rows, from 1 to the most that are served (600 where any number is)."""
    most = min(native.most_rows(dtype), 600)
    return [n for n in (*range(1, 36), 47, 48, 63, 64, 65, 100, 127, 128, 511) if n < most] + [most]


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
@pytest.mark.parametrize(("op", "dtype"), OPS)
def test_row_of_16_bit_product_is_the_same_in_every_batch_served(
    op: Any, dtype: torch.dtype, outs: int, depth: int, biased: bool
) -> None:
    """A row of a native 16-bit product has the same bits alone as among any number of rows that is served."""
    random = torch.Generator().manual_seed(3)
    counts = served(dtype)
    x, weight = (torch.randn(n, depth, generator=random).to(dtype) for n in (counts[-1], outs))
    bias = torch.randn(outs, generator=random).to(dtype) if biased else None
    whole = op(x, weight, bias)
    for rows in counts:
        assert torch.equal(op(x[:rows], weight, bias), whole[:rows]), rows
        assert torch.equal(op(x[-rows:], weight, bias), whole[-rows:]), rows


@pytest.mark.parametrize(("outs", "depth"), [(203, 77), (64, 32), (70, 1000), (1, 5), (4, 1)])
@pytest.mark.parametrize(("op", "dtype"), OPS)
def test_16_bit_product_is_near_the_exact_one_and_stays_in_its_output(
    op: Any, dtype: torch.dtype, outs: int, depth: int
) -> None:
    """Every number of rows gives the float64 product within the table's bounds, from strided rows too."""
    random = torch.Generator().manual_seed(5)
    counts = served(dtype)
    x = torch.randn(counts[-1], depth + 9, generator=random).to(dtype)[:, 4 : depth + 4]
    weight = (torch.randn(outs, depth + 5, generator=random) / depth**0.5).to(dtype)[:, :depth]
    exact = x.double() @ weight.double().T
    for rows in counts:
        with guarded_outputs():
            found = op(x[:rows], weight)
        assert_close("linear", found, exact[:rows], dtype)


@pytest.mark.parametrize("tokens", [23, 41])
@pytest.mark.parametrize(("op", "dtype"), OPS)
def test_bad_row_of_16_bit_product_harms_no_other(op: Any, dtype: torch.dtype, tokens: int) -> None:
    """A row of NaN and infinities leaves the bits of every other row as they are, and shows in its own."""
    random = torch.Generator().manual_seed(7)
    x, weight = (torch.randn(n, 100, generator=random).to(dtype) for n in (tokens, 37))
    clean = op(x, weight)
    for bad in (0, 3, 4, 11, 22, tokens - 1):
        spoiled = x.clone()
        spoiled[bad, 5], spoiled[bad, 6] = torch.nan, torch.inf
        found = op(spoiled, weight)
        others = torch.arange(tokens) != bad
        assert torch.equal(found[others], clean[others]) and found[bad].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_product_of_nothing(dtype: torch.dtype) -> None:
    """No rows give no rows, and an inner dimension of no elements gives the bias."""
    op, reason = native.load(dtype)
    if op is None:
        pytest.skip(reason)
    bias = torch.arange(5).to(dtype)
    assert op(torch.ones(0, 7, dtype=dtype), torch.ones(5, 7, dtype=dtype)).shape == (0, 5)
    for rows in (1, 4, 40):
        found = op(torch.ones(rows, 0, dtype=dtype), torch.ones(5, 0, dtype=dtype), bias)
        assert torch.equal(found, bias.expand(rows, 5))


def test_what_is_served() -> None:
    """A type is served for at least one row exactly where there is a native product of it; float32 at every number."""
    for dtype in (torch.float32, *HALVES):
        assert (native.most_rows(dtype) > 0) == (native.load(dtype)[0] is not None)
    assert native.most_rows(torch.float32) in (0, native.ALL_ROWS)
    assert native.most_rows(torch.float64) == 0 and native.load(torch.float64)[0] is None


class Shapes(TorchFunctionMode):
    """Notes how many rows torch's own products are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.mm, torch.nn.functional.linear):
            self.rows.add(args[0].shape[0])
        elif func is torch.addmm:
            self.rows.add(args[1].shape[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("native_kernels", [True, False])
@pytest.mark.parametrize("dtype", HALVES)
def test_torch_is_asked_for_few_shapes(dtype: torch.dtype, native_kernels: bool, biased: bool) -> None:
    """torch keeps what it prepares for every shape of a 16-bit product, so it is asked for few numbers of rows; the
    results are those of the plain product."""
    ops = select_ops("cpu", dtype, native=native_kernels)
    random = torch.Generator().manual_seed(5)
    x, weight = (torch.randn(n, 40, generator=random).to(dtype) for n in (1100, 24))
    bias = torch.randn(24, generator=random).to(dtype) if biased else None
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    with Shapes() as seen:
        for rows in (*range(1, 40), *range(40, 1100, 7), 512, 1024, 1100):
            assert_close("linear", ops.linear(x[:rows], weight, bias), exact[:rows], dtype)
    assert len(seen.rows) <= 8 * 8
    assert all(rows == whole_rows(rows) for rows in seen.rows)


def test_numbers_of_rows_that_are_used() -> None:
    """At most an eighth is left over or padded, and from one number to its double there are eight."""
    for rows in range(1, 5000):
        assert 0 < whole_rows(rows) <= rows
        assert rows - whole_rows(rows) < row_step(rows) <= max(1, rows // 8)
        assert whole_rows(whole_rows(rows)) == whole_rows(rows)
    assert len({whole_rows(rows) for rows in range(256, 512)}) == 8
