"""Products with weights in tiles: three ways, each near the exact result and the same for a row in any batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kimicore.kernels.linear import native as dense
from kimicore.kernels.packed_linear import native, reference
from kimicore.kernels.packed_linear.crossover import ALL, Crossover, measure_crossover, split
from kimicore.kernels.packed_linear.layout import CODE_BITS, PackedWeight
from kimicore.kernels.packed_linear.tiled import TiledWeight, tiled, untiled
from kimicore.kernels.team.native import parallel_entry

from .cases import guarded_outputs
from .test_packed_linear import KINDS, SHAPES, forged

WAYS = {"few": (ALL, ALL), "some": (0, ALL), "many": (0, 0)}
Product = Callable[..., Tensor]


@pytest.fixture(scope="module")
def product() -> Product:
    """The product with the way as its last argument."""
    tiles = native._tiles()
    if tiles is None:
        pytest.skip("no dot products of bytes and of bfloat16 on this processor, or no compiler")
    entry = native._tiled_product(tiles.kimicore_tiled_linear, parallel_entry() or 0)

    def call(x: Tensor, weight: TiledWeight, way: str, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        return entry(x, weight, bias, out, *WAYS[way])

    return call


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize(("outs", "depth", "group"), SHAPES)
def test_tiles_hold_the_weight(outs: int, depth: int, group: int, bits: int, kind: str) -> None:
    """A weight that is put into tiles and taken out again is as it was, in all its parts."""
    weight = forged(outs, depth, bits, group, kind, order=bits == 5)
    own = tiled(weight)
    assert own.shape == weight.shape
    for name in ("codes", "scales", "zeros", "offsets", "super_scales", "super_offsets", "order"):
        a, b = getattr(weight, name), getattr(untiled(own), name)
        assert (a is None and b is None) or torch.equal(a, b), name


def exact_product(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the product in float64, and for each result the sum of its terms' magnitudes."""
    meant = reference.unpack(weight, torch.float32).double()
    result = x.double() @ meant.T + (0 if bias is None else bias.double())
    return result, x.double().abs() @ meant.abs().T


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize(("outs", "depth", "group"), [*SHAPES, (50, 1000, 1000)])
def test_product_is_near_the_exact_one(
    product: Product, outs: int, depth: int, group: int, bits: int, kind: str, way: str
) -> None:
    """Each way is within bfloat16's rounding of the result, and a hundredth of a percent of its terms where weights are
    not rounded."""
    weight = forged(outs, depth, bits, group, kind)
    own = tiled(weight)
    rounded = way == "many" or (way == "some" and native._tiles().kimicore_tiled_serves() == 1)
    noise = torch.Generator().manual_seed(4)
    for rows in (1, 2, 5, 8, 9, 17, 33, 70):
        x = torch.randn(rows, depth + 3, generator=noise).bfloat16()[:, 1 : depth + 1]
        bias = torch.randn(outs, generator=noise).bfloat16() if rows % 2 else None
        exact, terms = exact_product(x, weight, bias)
        with guarded_outputs():
            found = product(x, own, way, bias)
        if rounded:
            same, _ = dense.load(torch.bfloat16)
            assert same is not None and torch.equal(found, same(x, reference.unpack(weight, torch.bfloat16), bias))
        bound = exact.abs() / 250 + terms * (4e-3 if rounded else 1e-4) + 1e-6
        assert ((found.double() - exact).abs() <= bound).all(), rows


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", CODE_BITS)
def test_row_is_the_same_in_every_batch(product: Product, bits: int, kind: str, way: str) -> None:
    """A row has the same bits alone as among others, and a row that is not finite shows in its own results alone."""
    own = tiled(forged(37, 192, bits, 32, kind))
    x = torch.randn(41, 192, generator=torch.Generator().manual_seed(6)).bfloat16()
    whole = product(x, own, way)
    for rows in (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 32, 33, 40):
        assert torch.equal(product(x[:rows], own, way), whole[:rows]), rows
        assert torch.equal(product(x[-rows:], own, way), whole[-rows:]), rows
    for bad in (0, 3, 16, 40):
        for value in (torch.nan, torch.inf, -torch.inf):
            spoiled = x.clone()
            spoiled[bad, 100] = value
            found = product(spoiled, own, way)
            others = torch.arange(41) != bad
            assert torch.equal(found[others], whole[others])
            assert not found[bad].isfinite().any()


@pytest.mark.parametrize("way", WAYS)
def test_inputs_of_every_size(product: Product, way: str) -> None:
    """Zeros, tiny, huge and unequal inputs (a thousand times the others) keep each way near the exact product."""
    weight = forged(20, 256, 4, 64)
    own = tiled(weight)
    noise = torch.randn(256, generator=torch.Generator().manual_seed(8))
    rows = [torch.zeros(256), noise * 1e-20, noise * 1e20, torch.where(torch.arange(256) == 9, 1e3, noise)]
    rows += [torch.full((256,), -5.0), torch.where(torch.arange(256) % 64 == 1, 1e-3, 0.0)]
    x = torch.stack(rows).bfloat16()
    exact, terms = exact_product(x, weight, None)
    assert ((product(x, own, way).double() - exact).abs() <= exact.abs() / 250 + terms * 4e-3 + 1e-30).all()
    assert product(torch.full((1, 256), 1e-39).bfloat16(), own, way).abs().max() < 1e-36


def test_parts_of_a_wider_result(product: Product) -> None:
    """Every way writes its outputs and nothing beside them, with columns out of order as well."""
    weight = forged(21, 96, 4, 32, order=True)
    x = torch.randn(40, 96, generator=torch.Generator().manual_seed(2)).bfloat16()
    assert weight.order is not None
    exact, terms = exact_product(x[:, weight.order.long()], weight, None)
    for way in WAYS:
        wide = torch.full((40, 40), 7.0, dtype=torch.bfloat16)
        product(x, tiled(weight), way, None, wide[:, 11:32])
        assert ((wide[:, 11:32].double() - exact).abs() <= exact.abs() / 250 + terms * 4e-3).all()
        assert (wide[:, :11] == 7).all() and (wide[:, 32:] == 7).all()


def test_crossover_is_what_is_faster() -> None:
    """The numbers of rows are those up to which the first way, and then the second, took less time."""

    def took(few: int, some: int) -> Crossover:
        clock = [0.0]

        def call(x: Tensor, weight: TiledWeight, least: int, most: int) -> Tensor:
            rows = x.shape[0]
            way = 0 if rows <= least else 1 if rows <= most else 2
            clock[0] += (rows / few, 1.0 + rows / some * 0.5, 1.5)[way] if rows <= 20 else (9.0, rows / some, 1.0)[way]
            return x

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kimicore.kernels.packed_linear.crossover.time.perf_counter", lambda: clock[0])
            return measure_crossover(call, whole_bytes=True, wide=False)

    assert took(6, 100) == Crossover(6, 64)
    assert took(1, 500) == Crossover(1, 64)
    assert took(100, 10) == Crossover(16, 16)


def test_one_figure_out_of_line_moves_no_split() -> None:
    """A single measurement that went wrong does not decide for how many rows a way is taken."""
    counts = (2, 4, 8, 16, 32)
    fair = [[1.0, 2.0], [1.0, 1.5], [1.0, 1.3], [1.0, 0.9], [1.0, 0.5]]
    assert split(counts, fair, 1) == 8
    for at in range(3):
        spoiled = [*fair[:at], [1.2, 1.0], *fair[at + 1 :]]
        assert split(counts, spoiled, 1) == (8 if at < 2 else 4)
    assert split(counts, [[2.0, 1.0]] * 5, 1) == 1
    assert split(counts, [[1.0, 2.0]] * 5, 1) == 32


def test_tiles_are_not_for_other_types() -> None:
    """A product of float32 refuses a weight in tiles, since it would be read wrongly."""
    op, reason = native.load(torch.float32)
    if op is None:
        pytest.skip(reason)
    with pytest.raises(ValueError, match="lies in tiles"):
        op(torch.ones(1, 64), tiled(forged(8, 64, 4, 32)))
