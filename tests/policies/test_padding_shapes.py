"""Padding: every claim of the built-in policies, for all small sizes."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimicore.contracts import Padding
from kimicore.errors import ConfigError
from kimicore.plugins import resolve
from kimicore.policies.padding.lcm import Lcm
from kimicore.policies.padding.max_len import MaxLen
from kimicore.policies.padding.packed import Packed

POLICIES: list[Padding] = [
    Packed(),
    MaxLen(),
    MaxLen(smallest=3),
    Lcm(),
    Lcm(tile_tokens=4, block_tokens=6, graph_rows=5, per_doubling=1),
    Lcm(tile_tokens=2, block_tokens=1, graph_tokens=3, graph_rows=1, graph_blocks=4, per_doubling=0),
    Lcm(tile_tokens=1, block_tokens=1, graph_rows=64, per_doubling=2),
]
TOKENS, BLOCKS = 60, 5


def sizes(tokens: int, rows: int, blocks: int) -> Any:
    """Yield every step of up to so many tokens, rows and blocks; a row has a token at least."""
    for own in range(1, tokens + 1):
        yield from itertools.product([own], range(1, min(rows, own) + 1), range(1, blocks + 1))


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_claims_hold_for_all_small_steps(policy: Padding) -> None:
    """Each step fits into its shape, wastes no more than claimed, has no more rows than tokens, and no more shapes
    come up than claimed, whatever the largest step is."""
    for most in (1, 7, 20, TOKENS):
        seen = set()
        for tokens, rows, blocks in sizes(most, 24, BLOCKS):
            shape = policy.shape(tokens, rows, blocks)
            assert shape.tokens >= tokens
            assert shape.tokens >= shape.rows >= rows
            assert shape.blocks >= blocks
            assert shape.tokens - tokens <= policy.waste_tokens(tokens)
            assert shape == policy.shape(tokens, rows, blocks)
            seen.add(shape)
        assert len(seen) <= policy.shapes(most, min(24, most), BLOCKS)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_claim_is_reached(policy: Padding) -> None:
    """The claim of waste is no larger than what some step of that size wastes, so it says something."""
    for tokens in range(1, TOKENS + 1):
        wastes = [policy.shape(tokens, rows, 1).tokens - tokens for rows in range(1, tokens + 1)]
        assert max(wastes) == policy.waste_tokens(tokens)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_shape_is_its_own_shape(policy: Padding) -> None:
    """Padding what is padded already changes nothing, and a larger step never gets a smaller shape."""
    before = policy.shape(1, 1, 1)
    for size in range(1, 3000):
        shape = policy.shape(size, size, size)
        assert policy.shape(shape.tokens, shape.rows, shape.blocks) == shape
        assert shape.tokens >= before.tokens and shape.rows >= before.rows and shape.blocks >= before.blocks
        before = shape


@given(
    st.integers(1, 64),
    st.sampled_from([1, 16, 24, 32, 64]),
    st.integers(1, 64),
    st.sampled_from([0, 1, 2, 4, 8]),
    st.integers(1, 50_000),
)
def test_lcm_sizes_are_multiples_of_what_is_needed(
    tile: int, block: int, graph: int, per_doubling: int, size: int
) -> None:
    """Tokens divide into tiles, blocks and graph buckets; a table's blocks make whole tiles of keys; less than a unit
    or a ``per_doubling``-th is added."""
    unit = math.lcm(tile, block, graph)
    if unit > 4096:
        with pytest.raises(ConfigError, match="common multiples"):
            Lcm(tile_tokens=tile, block_tokens=block, graph_tokens=graph)
        return
    policy = Lcm(tile_tokens=tile, block_tokens=block, graph_tokens=graph, graph_rows=1, per_doubling=per_doubling)
    shape = policy.shape(size, 1, size)
    assert shape.tokens % tile == shape.tokens % block == shape.tokens % graph == 0
    assert shape.blocks * block % tile == 0
    most = size / per_doubling if per_doubling else 0.0
    assert shape.tokens - size < max(unit, most)
    assert shape.blocks - size < max(math.lcm(tile, block) // block, most)


def test_the_lengths_of_sequences_have_no_say() -> None:
    """Three sequences of 1234, 567 and 89 tokens make a step of 2048 tokens, not of their least common multiple."""
    assert math.lcm(1234, 567, 89) == 62_271_342
    total = 1234 + 567 + 89
    shape = Lcm().shape(total, 3, -(-1234 // 16))
    assert (shape.tokens, shape.rows, shape.blocks) == (2048, 8, 80)
    assert Lcm().waste_tokens(total) == 158


def test_few_shapes() -> None:
    """Up to 8192 tokens there are 32 sizes where every multiple of 16 would make 512."""
    assert len({Lcm(graph_rows=1).shape(size, 1, 1).tokens for size in range(1, 8193)}) == 32
    assert Lcm(graph_rows=1).shapes(8192, 1, 1) == 32
    assert Lcm(graph_rows=1, per_doubling=0).shapes(8192, 1, 1) == 512


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"tile_tokens": 0}, "tile_tokens"),
        ({"per_doubling": 3}, "per_doubling"),
        ({"tile_tokens": 4096, "block_tokens": 4095}, "common multiples"),
        ({"graph_rows": True}, "graph_rows"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(wrong: dict[str, Any], named: str) -> None:
    """A setting out of range is a ConfigError that names it."""
    with pytest.raises(ConfigError, match=named):
        resolve("padding", "lcm", wrong)
