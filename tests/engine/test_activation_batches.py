"""Which rows of a packed batch enter products in 8 bits, whatever the step is made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kimicore.kernels.packed_linear.layout import PackedWeight
from kimicore.kernels.packed_linear.reference import packed_linear, packed_linear_int8
from kimicore.kernels.registry import select_ops
from kimicore.model.packed.rounding import round_to_nearest
from kimicore.model.packing import Packer
from kimicore.model.products import Halves, Stack, by_halves, holds_codes, product
from kimicore.policies.precision import ActivationPrecision
from kimicore.prefix import BlockKeys
from kimicore.sampling_params import SamplingParams
from kimicore.types import BoundRow, BoundStep, KVClass, RowPlan, Shape

CLASS = KVClass("full", (0,), None, "float32", (1, 2, 1, 16, 4), 512)
FORMATS = ("bfloat16", "int8")

# Prompt, tokens known in all, where the step begins in it, and how many it computes.
rows = st.tuples(st.integers(1, 60), st.integers(0, 20), st.integers(0, 70), st.integers(1, 70)).map(
    lambda one: (one[0], one[0] + one[1], min(one[2], one[0] + one[1] - 1), one[3])
)


def step_of(given_: list[tuple[int, int, int, int]], padding: int) -> BoundStep:
    """Return a step of such rows."""
    bound = []
    for number, (prompt, known, start, count) in enumerate(given_):
        count = min(count, known - start)
        plan = RowPlan(number, start, count, logits_at="last")
        tables = (list(range(1, 1 + -(-known // 16))),)
        bound.append(BoundRow(plan, [7] * known, prompt, tables, False, SamplingParams(seed=0), 0, 0, (), prompt))
    total = sum(row.plan.count for row in bound)
    return BoundStep(0, tuple(bound), Shape(total + padding, len(bound), 6))


@given(
    st.lists(rows, min_size=1, max_size=5),
    st.integers(0, 9),
    st.integers(0, 20),
    st.integers(1, 20),
    st.sampled_from(FORMATS),
    st.sampled_from(FORMATS),
)
def test_a_batch_knows_the_class_of_its_tokens(
    given_: list[tuple[int, int, int, int]], padding: int, first: int, last: int, ends: str, middle: str
) -> None:
    """A token is rounded where the map says so of its absolute place and its request's prompt; padding never is."""
    own = ActivationPrecision(ends, middle, first_tokens=first, last_tokens=last)
    step = step_of(given_, padding)
    batch = Packer([CLASS], 16, activations=own).pack(step)
    places = [
        (row.plan.start + at, row.prompt_tokens) for row in step.rows for at in range(row.plan.count)
    ]  # in the batch's order
    expected = [index for index, place in enumerate(places) if own.at(*place) == "int8"]
    assert batch.middle.dtype == torch.int64
    assert batch.middle.tolist() == expected
    assert Packer([CLASS], 16).pack(step).middle.tolist() == []


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 20)), min_size=1, max_size=5),
    st.integers(0, 20),
    st.integers(1, 20),
    st.sampled_from([("bfloat16", "int8"), ("int8", "bfloat16")]),
)
def test_all_agree_on_the_middle(
    prompts: list[tuple[int, int]], first: int, last: int, precisions: tuple[str, str]
) -> None:
    """Batches, names of blocks and the map itself have the same positions of a sequence in the middle of its prompt."""
    own = ActivationPrecision(*precisions, first_tokens=first, last_tokens=last)
    step = step_of([(prompt, prompt + more, 0, prompt + more) for prompt, more in prompts], 0)
    rounded = set(Packer([CLASS], 16, activations=own).pack(step).middle.tolist())
    index = 0
    for prompt, more in prompts:
        begin, stop = BlockKeys(16, b"s", own).middle(prompt)
        for position in range(prompt + more):
            inside = own.place(position, prompt) == "middle"
            assert inside == (first <= position < prompt - last)
            assert inside == (begin <= position < stop)
            assert inside == ((index in rounded) == (own.middle == "int8"))
            index += 1


@given(st.integers(1, 30), st.sets(st.integers(0, 29)), st.lists(st.integers(0, 29), max_size=12))
def test_halves_are_all_rows_once(count: int, rounded: set[int], chosen: list[int]) -> None:
    """Both halves are all rows, those of chosen rows say the same of these, and results come back in order."""
    inside = sorted(one for one in rounded if one < count)
    kept = [one for one in chosen if one < count]
    halves = Halves.of(count, torch.tensor(inside, dtype=torch.int64))
    x = torch.arange(count, dtype=torch.float32).view(-1, 1)
    found = by_halves(x, halves, lambda part, int8: part + (1000 if int8 else 0))
    assert found.flatten().tolist() == [at + (1000 if at in inside else 0) for at in range(count)]
    if halves is None:
        assert not inside
        return
    assert sorted([*halves.rounded.tolist(), *halves.plain.tolist()]) == list(range(count))
    few = halves.among(torch.tensor(kept, dtype=torch.int64))
    expected = [at for at, one in enumerate(kept) if one in inside]
    assert ([] if few is None else few.rounded.tolist()) == expected
    if few is not None:
        assert few.plain.tolist() == [at for at in range(len(kept)) if at not in expected]


@pytest.mark.parametrize("int8", [False, True])
def test_only_what_is_packed_is_rounded(int8: bool) -> None:
    """In a product of several parts the packed ones have rounded inputs, and plain ones have them as they are."""
    ops: Any = select_ops("cpu", torch.float32, native=False)
    random = torch.Generator().manual_seed(4)
    x, plain, other = (torch.randn(rows_, 64, generator=random) for rows_ in (5, 6, 8))
    packed = round_to_nearest(other, "int8")
    assert isinstance(packed, PackedWeight)
    bias = torch.randn(14, generator=random)
    coarse = packed_linear_int8 if int8 else packed_linear
    expected = torch.cat([torch.nn.functional.linear(x, plain, bias[:6]), coarse(x, packed, bias[6:])], dim=1)
    found = product(ops, x, Stack((plain, packed)), bias, int8=int8)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(product(ops, x, plain, int8=int8), x @ plain.T, rtol=1e-5, atol=1e-4)
    assert not torch.equal(packed_linear(x, packed), packed_linear_int8(x, packed))
    assert [holds_codes(one) for one in (plain, packed, Stack((plain, packed)), Stack((plain,)))] == [
        False,
        True,
        True,
        False,
    ]
