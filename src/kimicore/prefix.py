"""Names of block contents, and which of a prompt's blocks are already there.

A key is a keyed blake2b digest over the parent's key, the block's tokens and everything else that the bytes
of a KV block depend on. The secret makes keys unpredictable, and 128 bits make equal keys mean equal contents.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from hashlib import blake2b
from struct import pack
from typing import Any, Protocol

from attrs import evolve, fields, frozen

from kimicore.contracts import BlockKey
from kimicore.policies.precision import ActivationPrecision

__all__ = [
    "BlockKeys",
    "Chains",
    "KeyChain",
    "KeyContext",
    "KeyIndex",
    "PrefixIndex",
    "first_seen",
    "joined",
    "longest_hit",
]

KEY_BYTES = 16


@frozen
class KeyContext:
    """What a block's bytes depend on besides its tokens and those before them; every field is empty by default.

    ``weights``: fingerprint of the weights and their precision map. ``kv_class``: name, layers, dtype and window.
    ``rope``: the variant with its factors (a dynamic one with the length that fixed its factor). ``activation``: which
    classes of positions have inputs in 8 bits; a chain's digests say which positions of a block are of which class.
    ``salt``: the tenant's; requests with different salts never share a block.
    """

    weights: bytes = b""
    tokenizer: bytes = b""
    lexicon: bytes = b""
    kv_class: bytes = b""
    rope: bytes = b""
    adapter: bytes = b""
    guide: bytes = b""
    activation: bytes = b""
    salt: bytes = b""

    def encoded(self) -> bytes:
        """Return the fields with their lengths, so that no two contexts give the same bytes."""
        return b"".join(joined(getattr(self, name)) for name in _CONTEXT_FIELDS)


_CONTEXT_FIELDS = tuple(one.name for one in fields(KeyContext))


def joined(*parts: bytes) -> bytes:
    """Return the parts, each after its length as 8 bytes."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


class BlockKeys:
    """Makes the keys of an engine: ``secret`` (at most 64 bytes; None draws one) and the block size in tokens.

    ``activations``: by position, where any have 8 bits; None: no key depends on them.
    """

    def __init__(
        self, block_tokens: int, secret: bytes | None = None, activations: ActivationPrecision | None = None
    ) -> None:
        self.block_tokens = block_tokens
        self._secret = secrets.token_bytes(32) if secret is None else secret
        self._activations = activations

    def chain(self, context: KeyContext, middle: tuple[int, int] = (0, 0)) -> KeyChain:
        """Return an empty chain of keys for one sequence in one KV class; ``middle``: see :meth:`middle`."""
        start = blake2b(context.encoded(), key=self._secret, digest_size=KEY_BYTES, person=b"kimicore-block")
        return KeyChain(start, self.block_tokens, middle)

    def chains(
        self, contexts: Sequence[KeyContext], salt: bytes, rope: bytes | None, prompt_tokens: int
    ) -> tuple[KeyChain, ...]:
        """Return a sequence's chain per KV class, with its tenant's salt (and its own rope variant where given).

        ``prompt_tokens``: length of the prompt that it is or was computed for.
        """
        middle = self.middle(prompt_tokens)
        if rope is None:
            return tuple(self.chain(evolve(one, salt=salt), middle) for one in contexts)
        return tuple(self.chain(evolve(one, salt=salt, rope=joined(one.rope, rope)), middle) for one in contexts)

    def middle(self, prompt_tokens: int) -> tuple[int, int]:
        """Return the first position of a prompt's middle and the one behind its last.

        (0, 0) where there is none, or where it is computed as the ends are.
        """
        own = self._activations
        if own is None or (own.middle == "int8") == (own.ends == "int8"):
            return 0, 0
        first, stop = own.span(prompt_tokens)
        return (first, stop) if first < stop else (0, 0)


class KeyChain:
    """Keys of a sequence's full blocks; ``keys[i]`` names tokens ``[i * block_tokens, (i + 1) * block_tokens)``.

    ``middle``: the positions ``[first, stop)`` that are of the middle class; a block's key says which of its own are.
    """

    __slots__ = ("_middle", "_start", "block_tokens", "keys")

    def __init__(self, start: Any, block_tokens: int, middle: tuple[int, int] = (0, 0)) -> None:
        self._start = start
        self._middle = middle
        self.block_tokens = block_tokens
        self.keys: list[BlockKey] = []

    def extend(self, tokens: Sequence[int], blocks: int) -> list[BlockKey]:
        """Return at least ``blocks`` keys, computing those that are missing from ``tokens`` (all of the sequence's)."""
        keys = self.keys
        done = len(keys)
        if done >= blocks:
            return keys
        size = self.block_tokens
        more = tokens[done * size : blocks * size]
        data = pack(f"<{len(more)}i", *more)
        parent = keys[-1] if keys else b"\0" * KEY_BYTES
        first, stop = self._middle
        for at in range(0, (blocks - done) * size * 4, size * 4):
            digest = self._start.copy()
            digest.update(parent)
            digest.update(data[at : at + size * 4])
            begin = len(keys) * size
            if first < begin + size and begin < stop:
                digest.update(pack("<2i", max(first - begin, 0), min(stop - begin, size)))
            parent = digest.digest()
            keys.append(parent)
        return keys


Chains = Sequence[KeyChain | None]
"""A sequence's keys per KV class; None where it has no blocks that others could find."""


class PrefixIndex:
    """Which slot of one KV class holds which content; only full blocks are ever in it."""

    __slots__ = ("slots",)

    def __init__(self) -> None:
        self.slots: dict[BlockKey, int] = {}

    def __contains__(self, key: object) -> bool:
        return key in self.slots

    def run(self, keys: Sequence[BlockKey], blocks: int) -> int:
        """Return how many of the first ``blocks`` keys are held, in a class where a block's parent always is.

        That makes "held" true up to some block and false after it, so halving finds the place.
        """
        slots = self.slots
        low, high = 0, blocks
        while low < high:
            middle = (low + high + 1) >> 1
            if keys[middle - 1] in slots:
                low = middle
            else:
                high = middle - 1
        return low


class KeyIndex(Protocol):
    """Whether blocks of one KV class are there."""

    def __contains__(self, key: object, /) -> bool: ...

    def run(self, keys: Sequence[BlockKey], blocks: int) -> int:
        """Return how many of the first ``blocks`` keys are there without a gap."""
        ...


def first_seen(position: int, window: int | None, block_tokens: int) -> int:
    """Return the first block that a query at ``position`` sees in a class of this window."""
    return 0 if window is None or position < window else (position - window + 1) // block_tokens


def longest_hit(
    indexes: Sequence[KeyIndex],
    windows: Sequence[int | None],
    chains: Chains,
    block_tokens: int,
    blocks: int,
) -> int:
    """Return the most blocks (at most ``blocks``) after which a sequence can go on in every class at once.

    A class without a window needs all of them; one with a window those that the next query sees; one without a chain
    none. The chains must have that many keys.
    """
    count = blocks
    for index, window, chain in zip(indexes, windows, chains, strict=True):
        if window is None and chain is not None:
            count = index.run(chain.keys, count)
    settled = False
    while not settled:
        settled = True
        for index, window, chain in zip(indexes, windows, chains, strict=True):
            if window is None or chain is None:
                continue
            at = count - 1
            while at >= first_seen(count * block_tokens, window, block_tokens):
                if chain.keys[at] not in index:
                    count = at  # every longer hit would need this block as well
                    settled = False
                at -= 1
    return count
