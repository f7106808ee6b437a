"""The class of positions in the names of blocks: who shares them where activations have two precisions."""

from __future__ import annotations

from hashlib import blake2b
from itertools import takewhile
from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimicore.contracts import BlockKey
from kimicore.policies.precision import ActivationPrecision
from kimicore.prefix import BlockKeys, KeyContext

SIZE = 4
SECRET = b"s"
CONTEXT = KeyContext(weights=b"w", activation=b"middle")


def rounds(first: int, last: int, *, ends: str = "bfloat16", middle: str = "int8") -> ActivationPrecision:
    """Return a precision by position."""
    return ActivationPrecision(ends, middle, first_tokens=first, last_tokens=last)


def keys_of(own: ActivationPrecision | None, tokens: list[int], prompt: int) -> list[BlockKey]:
    """Return the keys of a sequence that began with a prompt of so many tokens."""
    (chain,) = BlockKeys(SIZE, SECRET, own).chains([CONTEXT], b"", None, prompt)
    return chain.extend(tokens, len(tokens) // SIZE)


def by_hand(tokens: list[int], classes: list[str]) -> list[BlockKey]:
    """Return keys by their definition: with the bounds of a block's middle positions where it has any."""
    found: list[BlockKey] = []
    parent = b"\0" * 16
    for at in range(0, len(tokens) // SIZE * SIZE, SIZE):
        digest = blake2b(CONTEXT.encoded(), key=SECRET, digest_size=16, person=b"kimicore-block")
        digest.update(parent + pack(f"<{SIZE}i", *tokens[at : at + SIZE]))
        own = [place for place, name in enumerate(classes[at : at + SIZE]) if name == "middle"]
        if own:
            digest.update(pack("<2i", own[0], own[-1] + 1))
        parent = digest.digest()
        found.append(parent)
    return found


positions = st.tuples(st.integers(0, 9), st.integers(1, 9))
sequence = st.tuples(st.integers(1, 30), st.integers(0, 12))  # prompt, and what was generated


@given(positions, sequence, st.lists(st.integers(0, 40), max_size=6))
def test_keys_are_those_of_the_classes(counts: tuple[int, int], one: tuple[int, int], pieces: list[int]) -> None:
    """A chain has the class of every position that the map gives it, however its keys were asked for."""
    own = rounds(*counts)
    prompt, more = one
    tokens = list(range(prompt + more))
    classes = [own.place(at, prompt) for at in range(len(tokens))]
    (chain,) = BlockKeys(SIZE, SECRET, own).chains([CONTEXT], b"", None, prompt)
    for blocks in sorted(pieces):
        chain.extend(tokens[: len(tokens)], min(blocks, len(tokens) // SIZE))
    assert chain.extend(tokens, len(tokens) // SIZE) == by_hand(tokens, classes)


@given(positions, sequence, sequence, st.integers(0, 42))
def test_blocks_are_shared_where_tokens_and_classes_agree(
    counts: tuple[int, int], one: tuple[int, int], other: tuple[int, int], common: int
) -> None:
    """Two sequences share a block exactly where tokens and classes agree, its own and all before it."""
    own = rounds(*counts)
    made = []
    for number, (prompt, more) in enumerate((one, other)):
        tokens = [at if at < common else 1000 * (number + 1) + at for at in range(prompt + more)]
        classes = [own.place(at, prompt) == "middle" for at in range(len(tokens))]
        made.append((list(zip(tokens, classes, strict=True)), keys_of(own, tokens, prompt)))
    (mine, keys), (theirs, others) = made
    agree = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(mine, theirs, strict=False)))
    shared = [a == b for a, b in zip(keys, others, strict=False)]
    assert shared == [(at + 1) * SIZE <= agree for at in range(len(shared))]


@pytest.mark.parametrize(
    "own",
    [None, rounds(2, 2, middle="bfloat16"), rounds(2, 2, ends="int8"), rounds(2, 2, ends="float32", middle="float16")],
)
def test_without_two_precisions_keys_stay_as_they_are(own: ActivationPrecision | None) -> None:
    """Where all positions are computed alike, keys are those of a chain that knows no classes, for any prompt."""
    tokens = list(range(40))
    plain = BlockKeys(SIZE, SECRET).chain(CONTEXT).extend(tokens, 10)
    assert plain == by_hand(tokens, ["last"] * 40)
    for prompt in (1, 17, 40):
        assert keys_of(own, tokens, prompt) == plain
    assert keys_of(rounds(2, 2), tokens, 40) != plain
    assert keys_of(rounds(40, 2), tokens, 40) == plain


def test_the_other_way_round_has_classes_too() -> None:
    """Ends in 8 bits around a middle in 16 make two classes as well."""
    tokens = list(range(40))
    assert keys_of(rounds(2, 2, ends="int8", middle="bfloat16"), tokens, 40) == keys_of(rounds(2, 2), tokens, 40)
