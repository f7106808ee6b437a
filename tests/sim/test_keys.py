"""Blocks of a trace are shared exactly as far as their ids say."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from kimicore.prefix import KeyContext, joined
from kimicore.sim.keys import TraceKeys
from kimicore.sim.traces import TraceRequest


@st.composite
def pairs(draw: Any) -> tuple[TraceRequest, TraceRequest, int]:
    """Two requests whose first ids agree, and the ledger's block size."""
    per = draw(st.sampled_from([1, 4, 6, 16]))
    size = draw(st.sampled_from([1, 3, 4, 8, 16, 24]))
    common = draw(st.lists(st.integers(0, 3), max_size=5))
    made = []
    for own in (100, 200):
        ids = common + [own + at for at in range(draw(st.integers(0, 3)))]
        least = max(1, (len(ids) - 1) * per + 1)
        prompt = draw(st.integers(least, max(least, len(ids) * per) + draw(st.integers(0, 20))))
        made.append(TraceRequest(0.0, prompt, 5, tuple(ids), per if ids else 0))
    return made[0], made[1], size


def chain(keys: TraceKeys, request: TraceRequest, number: int, blocks: int) -> list[bytes]:
    """Return the first keys of a request, as the book asks for them."""
    found = keys.chains((KeyContext(),), joined(keys.salt(request, number)), None)
    return found[0].extend((), blocks)[:blocks]


@given(pairs())
@example((TraceRequest(0.0, 41, 5, (0, 0, 0), 16), TraceRequest(0.0, 41, 5, (0, 0, 0), 16), 1))
def test_blocks_are_shared_where_all_their_tokens_are(pair: tuple[TraceRequest, TraceRequest, int]) -> None:
    """A block has the same name in two requests exactly when it lies within the tokens of their common ids."""
    first, second, size = pair
    common = 0
    for one, other in zip(first.blocks, second.blocks, strict=False):
        if one != other:
            break
        common += 1
    shared = min(common * max(first.block_tokens, second.block_tokens), first.prompt_tokens, second.prompt_tokens)
    keys = TraceKeys(size)
    one, other = chain(keys, first, 1, 40), chain(keys, second, 2, 40)
    assert [a == b for a, b in zip(one, other, strict=True)] == [at < shared // size for at in range(40)]
    assert len({*one, *other}) == 80 - min(shared // size, 40)


def test_tenants_share_nothing() -> None:
    """The same ids of two tenants are two contents."""
    keys = TraceKeys(16)
    one = TraceRequest(0.0, 64, 1, (1, 2, 3, 4), 16, tenant="a")
    other = TraceRequest(0.0, 64, 1, (1, 2, 3, 4), 16, tenant="b")
    assert not set(chain(keys, one, 1, 4)) & set(chain(keys, other, 2, 4))
    assert keys.of_prompt(one) == chain(keys, one, 3, 4)


def test_the_same_id_after_another_start_is_another_block() -> None:
    """A block is named with all that comes before it."""
    keys = TraceKeys(16)
    one = keys.of_prompt(TraceRequest(0.0, 32, 1, (1, 3), 16))
    other = keys.of_prompt(TraceRequest(0.0, 32, 1, (2, 3), 16))
    assert not set(one) & set(other)


def test_a_bare_cache_counts_the_last_block_too() -> None:
    """The ids of a prompt give one key each, also where the last block is not full."""
    keys = TraceKeys(512)
    assert len(keys.of_prompt(TraceRequest(0.0, 1030, 5, (0, 1, 7), 512))) == 3
    assert len(TraceKeys(256).of_prompt(TraceRequest(0.0, 1030, 5, (0, 1, 7), 512))) == 5
