"""The choice of blocks: every implementation against a plain computation, on summaries whose unused entries are NaN."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kimicore.errors import ConfigError
from kimicore.kernels.choose_blocks import native, reference
from kimicore.kernels.choose_blocks.reference import RANGE
from kimicore.kernels.key_summary.reference import key_summary

from .cases import implementations
from .tolerances import DTYPES

OPS = implementations(native.load(), reference=reference.choose_blocks)
NATIVE = implementations(native.load())
SHAPES = [((9, 3), 64, 16), ((4, 1), 256, 32), ((8, 8), 80, 16), ((6, 2), 7, 64), ((14, 2), 33, 16), ((2, 2), 128, 1)]
LAYER = 1


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Run with this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@frozen(eq=False)
class Rows:
    """One query per row over summaries that lie behind other content of their blocks; what no row may read is NaN."""

    q: Tensor
    summary: Tensor
    table: Tensor
    contexts: Tensor
    keep: Tensor
    block_tokens: int
    scale: float = 0.3

    def run(self, op: Any, **how: int) -> tuple[Tensor, Tensor]:
        """Call the operation, and check the types and sizes of what it gives."""
        table, contexts = op(
            self.q, self.summary, LAYER, self.table, self.contexts, self.keep,
            block_tokens=self.block_tokens, scale=self.scale, **how,
        )  # fmt: skip
        kept = [self.kept(row, **how) for row in range(len(self.q))]
        assert table.dtype == contexts.dtype == torch.int32
        assert table.shape == (len(self.q), self.summary.shape[2], max(kept, default=0))
        for row, count in enumerate(kept):
            assert not table[row, :, count:].any(), "entries behind the kept ones are 0"
        return table, contexts

    def blocks(self, row: int) -> int:
        """How many blocks the row's context takes."""
        return -(-int(self.contexts[row]) // self.block_tokens)

    def kept(self, row: int, first: int = 1, recent: int = 2) -> int:
        """How many blocks the row keeps."""
        return min(self.blocks(row), max(int(self.keep[row]), first + recent))

    def only(self, row: int) -> Rows:
        """The row alone."""
        part = slice(row, row + 1)
        return evolve(self, q=self.q[part], table=self.table[part], contexts=self.contexts[part], keep=self.keep[part])


def case(
    rows: Sequence[tuple[int, int]], heads: tuple[int, int], dim: int, block_tokens: int, dtype: torch.dtype, **how: int
) -> Rows:
    """Return rows of (context, keep): only the summaries between the first and the recent blocks are numbers."""
    random = torch.Generator().manual_seed(how.get("seed", 0))
    blocks = [-(-context // block_tokens) for context, _ in rows]
    slots = (torch.randperm(sum(blocks), generator=random) + 1).tolist()
    size = 3 * heads[1] * 2 * dim
    memory = torch.full((sum(blocks) + 1, 17 + size), math.nan, dtype=dtype)
    summary = memory[:, 17:].unflatten(1, (3, heads[1], 2, dim))
    table = torch.zeros(len(rows), max([*blocks, 1]) + 1, dtype=torch.int32)
    for row, count in enumerate(blocks):
        for n in range(count):
            table[row, n] = slot = slots.pop()
            if how.get("first", 1) <= n < count - how.get("recent", 2):
                noise = torch.randn(heads[1], 5, dim, generator=random).to(dtype)
                summary[slot, LAYER] = torch.stack((noise.amin(dim=1), noise.amax(dim=1)), dim=1)
    q = torch.randn(len(rows), heads[0], dim, generator=random).to(dtype)
    contexts, keep = (torch.tensor([pair[i] for pair in rows], dtype=torch.int32) for i in (0, 1))
    return Rows(q, summary, table, contexts, keep, block_tokens)


def plain_estimates(rows: Rows, row: int, head: int, rivals: Sequence[int]) -> list[float]:
    """Return the estimates of blocks ``rivals`` in float64, one query head and one channel at a time."""
    group = rows.q.shape[1] // rows.summary.shape[2]
    found = [0.0] * len(rivals)
    for h in range(head * group, (head + 1) * group):
        scores = []
        for n in rivals:
            low, high = rows.summary[int(rows.table[row, n]), LAYER, head].tolist()
            query = rows.q[row, h].tolist()
            sums = [x * (a + b) / 2 + RANGE * abs(x) * (b - a) / 2 for x, a, b in zip(query, low, high, strict=True)]
            scores.append(rows.scale * sum(sums))
        top = max(scores, default=0.0)
        weights = [math.exp(score - top) for score in scores]
        found = [have + weight / sum(weights) for have, weight in zip(found, weights, strict=True)]
    return found


def check(op: Any, rows: Rows, *, first: int = 1, recent: int = 2) -> None:
    """Hold the choice to the plain one; two blocks may change places where their estimates are all but equal."""
    table, contexts = rows.run(op, first=first, recent=recent)
    for row in range(len(rows.q)):
        count, kept = rows.blocks(row), rows.kept(row, first, recent)
        assert int(contexts[row]) == int(rows.contexts[row]) - (count - kept) * rows.block_tokens
        own = rows.table[row, :count].tolist()
        for head in range(table.shape[1]):
            at = [own.index(slot) for slot in table[row, head, :kept].tolist()]
            assert at == sorted(set(at)), "blocks keep their order, each once"
            if kept == count:
                assert at == list(range(count))
                continue
            assert at[:first] == list(range(first)) and at[kept - recent :] == list(range(count - recent, count))
            rivals = range(first, count - recent)
            found = dict(zip(rivals, plain_estimates(rows, row, head, rivals), strict=True))
            chosen = at[first : kept - recent]
            best = max((found[n] for n in rivals if n not in chosen), default=0.0)
            least = best * (1 - 1e-4 * max(1.0, rows.scale)) - 1e-37  # float32 holds nothing smaller
            assert all(found[n] >= least for n in chosen), (row, head)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "dim", "block_tokens"), SHAPES)
def test_matches_a_plain_choice(
    op: Any, dtype: torch.dtype, heads: tuple[int, int], dim: int, block_tokens: int
) -> None:
    """Long and short rows get the blocks of the largest estimates and their context over them, even and odd sizes."""
    tokens = [(90, 20), (1, 1), (70, 69), (3, 9), (40, 1), (12, 4)]
    check(
        op,
        case(
            [(n * block_tokens - n % 3, keep) for n, keep in tokens if n % 3 < block_tokens],
            heads,
            dim,
            block_tokens,
            dtype,
        ),
    )


@pytest.mark.parametrize("op", OPS)
@given(
    rows=st.lists(st.tuples(st.integers(0, 900), st.integers(-1, 50)), max_size=4),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 7),
    dim=st.integers(1, 40),
    block_tokens=st.sampled_from((16, 32, 5)),
    first=st.integers(0, 3),
    recent=st.integers(1, 4),
)
def test_any_shape(
    op: Any,
    rows: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    dim: int,
    block_tokens: int,
    first: int,
    recent: int,
) -> None:
    """Any mixture of rows, heads and sizes, rows without context too, gets the plain choice and reads nothing else."""
    heads = kv_heads * group, kv_heads
    check(
        op, case(rows, heads, dim, block_tokens, torch.float32, first=first, recent=recent), first=first, recent=recent
    )


@pytest.mark.parametrize("op", NATIVE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_native_agrees_with_the_reference(op: Any, dtype: torch.dtype) -> None:
    """Native and reference give equal tables where the last chosen estimate and the best one left out lie apart."""
    rows = case([(1600, 30), (1100, 12), (400, 9), (90, 50), (700, 20), (333, 7)], (9, 3), 64, 16, dtype)
    table, contexts = rows.run(op)
    expected, shrunk = rows.run(reference.choose_blocks)
    assert torch.equal(contexts, shrunk)
    compared = 0
    for row in range(len(rows.q)):
        rivals, places = range(1, rows.blocks(row) - 2), rows.kept(row) - 3
        for head in range(3):
            found = sorted(plain_estimates(rows, row, head, rivals), reverse=True)
            if places == len(found) or found[places] < found[places - 1] * (1 - 1e-3):
                assert torch.equal(table[row, head], expected[row, head]), (row, head)
                compared += 1
    assert compared >= 12


@given(seed=st.integers(0, 10**6), group=st.integers(1, 4), dim=st.integers(1, 40), dtype=st.sampled_from(DTYPES))
def test_the_range_bounds_the_scores(seed: int, group: int, dim: int, dtype: torch.dtype) -> None:
    """No key of a block has a score above what its whole range gives, of which the estimate takes a quarter."""
    random = torch.Generator().manual_seed(seed)
    kv = torch.randn(6, 1, 2, 1, 16, dim, generator=random).to(dtype)
    q, summary = torch.randn(group, dim, generator=random).to(dtype), torch.empty(6, 1, 1, 2, dim, dtype=dtype)
    key_summary(kv, 0, torch.arange(6, dtype=torch.int32), summary)
    highest = 0.2 * (kv[:, 0, 0, 0].double() @ q.double().T).amax(dim=1)  # [6, G]
    for h in range(group):
        found = reference.estimates(q[h : h + 1], summary[:, 0], scale=0.2)[0].double().log()  # bound - top
        low, high = (summary[:, 0, 0, i].double() for i in (0, 1))
        middle = 0.2 * (q[h].double() * (low + high) / 2).sum(dim=1)
        reach = 0.2 * (q[h].double().abs() * (high - low) / 2).sum(dim=1)
        score = middle + RANGE * reach
        torch.testing.assert_close(found - found.max(), score - score.max(), rtol=1e-4, atol=1e-4)
        assert (highest[:, h] <= middle + reach + 1e-9).all()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_block_of_the_best_key_is_chosen(op: Any, dtype: torch.dtype) -> None:
    """A block with a key that lies along the query is chosen before any block of noise."""
    rows = case([(1000, 4), (1000, 4)], (4, 2), 32, 16, dtype)
    for row, head, n in ((0, 0, 7), (0, 1, 33), (1, 0, 1), (1, 1, 60)):
        key = 4 * rows.q[row, 2 * head : 2 * head + 2].sum(dim=0)
        block = rows.summary[int(rows.table[row, n]), LAYER, head]
        block[0], block[1] = torch.minimum(block[0], key), torch.maximum(block[1], key)
        assert rows.table[row, n] in rows.run(op)[0][row, head]


@pytest.mark.parametrize("op", OPS)
def test_a_row_that_may_keep_all_gets_its_table_back(op: Any) -> None:
    """Rows with no more blocks than they may keep get them in order and whole contexts; no summary is read."""
    rows = case([(300, 19), (40, 50), (33, 0), (17, -4), (0, 5)], (4, 2), 16, 16, torch.float32)
    rows = evolve(rows, summary=torch.full_like(rows.summary, math.nan))
    table, contexts = rows.run(op)
    assert torch.equal(contexts, rows.contexts)
    for row in range(5):
        count = rows.blocks(row)
        assert torch.equal(table[row, :, :count], rows.table[row, :count].expand(2, count))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("keep", [-1, 0, 1, 3])
def test_keep_is_raised(op: Any, keep: int) -> None:
    """A row may not keep fewer than its first and recent blocks."""
    rows = case([(161, keep)], (2, 1), 16, 16, torch.float32)
    table, contexts = rows.run(op)
    assert table[0, 0].tolist() == rows.table[0, [0, 9, 10]].tolist()
    assert contexts.tolist() == [33]


@pytest.mark.parametrize("op", OPS)
def test_the_later_of_equals_is_chosen(op: Any) -> None:
    """Of blocks with equal estimates the later ones are chosen, after every larger one."""
    rows = case([(2000, 30)], (6, 2), 32, 16, torch.float32)
    slots = rows.table[0, 1:123].long()
    rows.summary[slots, LAYER] = rows.summary[slots[0], LAYER].clone()
    table = rows.run(op)[0]
    assert torch.equal(table[0], rows.table[0, [0, *range(96, 125)]].expand(2, 30))
    rows.summary[slots[39], LAYER] = 2 * rows.summary[slots[0], LAYER]  # at position 40: a wider range
    table = rows.run(op)[0]
    assert torch.equal(table[0], rows.table[0, [0, 40, *range(97, 125)]].expand(2, 30))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_nan_is_chosen(op: Any, wrong: float) -> None:
    """Blocks with a NaN or an infinity in their summary are chosen, and the others are judged as without them."""
    rows = case([(1600, 12), (1600, 12)], (6, 2), 20, 16, torch.float32)
    calm = rows.run(op)[0]
    left_out = [n for n in range(1, 98) if rows.table[0, n] not in calm[0, 1]][::30][:2]
    for n in left_out:
        rows.summary[int(rows.table[0, n]), LAYER, 1, :, 7] = wrong
    table = rows.run(op)[0]
    assert torch.equal(table[0, 0], calm[0, 0]) and torch.equal(table[1], calm[1])
    chosen = set(table[0, 1].tolist())
    assert {int(rows.table[0, n]) for n in left_out} <= chosen
    assert len(chosen & set(calm[0, 1].tolist())) == 10


@pytest.mark.parametrize("op", OPS)
def test_a_nan_query_takes_the_latest(op: Any) -> None:
    """A query that holds a NaN makes all blocks equal, and disturbs neither other kv heads nor other rows."""
    rows = case([(1600, 12), (1600, 12)], (6, 2), 20, 16, torch.float32)
    calm = rows.run(op)[0]
    rows.q[0, 4, 3] = math.nan
    table = rows.run(op)[0]
    assert torch.equal(table[0, 0], calm[0, 0]) and torch.equal(table[1], calm[1])
    assert torch.equal(table[0, 1], rows.table[0, [0, *range(89, 100)]])


@pytest.mark.parametrize("op", OPS)
def test_strong_and_weak_scores(op: Any) -> None:
    """Scores that differ by more than an exponential holds are still put in order at the top, and so are small ones."""
    for scale in (40.0, 1e-3):
        check(op, evolve(case([(700, 9), (900, 30)], (2, 1), 32, 16, torch.float32), scale=scale))


@pytest.mark.parametrize("op", OPS)
def test_strided_queries(op: Any) -> None:
    """Queries may be a part of a wider product, as they lie in it."""
    rows = case([(600, 12), (900, 7)], (6, 2), 24, 16, torch.float32)
    wide = torch.full((2, 10, 24), math.nan)
    wide[:, 2:8] = rows.q
    assert torch.equal(evolve(rows, q=wide[:, 2:8]).run(op)[0], rows.run(op)[0])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", NATIVE)
def test_a_row_is_the_same_in_every_batch(op: Any, dtype: torch.dtype) -> None:
    """A row chooses the same blocks alone, beside others and with any number of threads, equal estimates or not."""
    rows = case([(7000, 60), (700, 9), (33, 2), (1500, 40), (6990, 100)], (9, 3), 64, 16, dtype)
    slots = rows.table[4, 1:400].long()
    rows.summary[slots[::2], LAYER] = rows.summary[slots[0], LAYER].clone()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    table, contexts = rows.run(op)
    torch.set_num_threads(before)
    for _ in range(5):
        assert all(map(torch.equal, rows.run(op), (table, contexts)))
    for row in range(5):
        alone, context = rows.only(row).run(op)
        assert torch.equal(alone[0], table[row, :, : alone.shape[2]]) and context[0] == contexts[row], row


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("op", NATIVE)
def test_nothing_is_written_outside_of_the_answer(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the native kernel gives is all that it writes: what lies before and behind keeps its content."""
    rows = case([(7000, 60), (700, 900), (33, 2), (1500, 3), (0, 7)], (9, 3), 64, 16, torch.float32)
    expected = rows.run(reference.choose_blocks)
    made: list[tuple[Tensor, int]] = []

    def empty(count: int, dtype: torch.dtype) -> Tensor:
        made.append((torch.full((count + 200,), -7, dtype=dtype), count))
        return made[-1][0][100 : 100 + count]

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        table, contexts = op(
            rows.q, rows.summary, LAYER, rows.table, rows.contexts, rows.keep, block_tokens=16, scale=rows.scale
        )
    assert table.shape == expected[0].shape and torch.equal(contexts, expected[1]) and len(made) == 2
    assert (table >= 0).all()
    for buffer, count in made:
        used = table.numel() if count > 5 else count
        assert (buffer[:100] == -7).all() and (buffer[100 + used :] == -7).all()


@pytest.mark.parametrize("op", OPS)
def test_places_of_always_kept_blocks_are_checked(op: Any) -> None:
    """A row cannot do without its last block, nor keep fewer than none of its first."""
    rows = case([(300, 5)], (2, 1), 16, 16, torch.float32)
    for how in ({"recent": 0}, {"first": -1}):
        with pytest.raises(ConfigError, match="first="):
            rows.run(op, **how)


def test_native_refuses_wrong_tables() -> None:
    """The native kernel reads nothing outside of the cache: wrong tables and contexts are refused."""
    op = native.load()[0]
    if op is None:
        pytest.skip("this machine cannot compile the native kernel")
    rows = case([(300, 5), (200, 5)], (2, 1), 16, 16, torch.float32)
    for slot in (-1, rows.summary.shape[0]):
        table = rows.table.clone()
        table[1, 4] = slot
        with pytest.raises(ValueError, match="block_table"):
            evolve(rows, table=table).run(op)
    with pytest.raises(ValueError, match="context"):
        evolve(rows, contexts=torch.tensor([300, 16 * rows.table.shape[1] + 1], dtype=torch.int32)).run(op)
