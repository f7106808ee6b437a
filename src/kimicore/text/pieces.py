"""What each token id stands for, as bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from types import MappingProxyType

__all__ = ["BYTE_OF", "BYTE_PIECE", "CHAR_OF", "TokenPieces", "byte_level_piece", "sentencepiece_piece", "spell"]

BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""Name of a byte piece in a SentencePiece vocabulary; anything that merely looks like one is plain text."""


def _alphabet() -> dict[int, str]:
    """Map each byte to GPT-2's printable stand-in: itself where printable in Latin-1, else the next one from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


CHAR_OF = MappingProxyType(_alphabet())
BYTE_OF = MappingProxyType({ord(char): byte for byte, char in CHAR_OF.items()})


def spell(data: bytes) -> str:
    """Return ``data`` in the letters of a byte-level vocabulary."""
    return "".join(CHAR_OF[byte] for byte in data)


def byte_level_piece(token: str) -> bytes:
    """Return the bytes that a byte-level token stands for; one with foreign letters stands for its own text."""
    try:
        return bytes(map(BYTE_OF.__getitem__, map(ord, token)))
    except KeyError:
        return token.encode("utf-8", "replace")


def sentencepiece_piece(token: str) -> bytes:
    """Return the bytes that a SentencePiece token stands for."""
    byte = BYTE_PIECE.fullmatch(token)
    return bytes((int(byte[1], 16),)) if byte else token.replace("\u2581", " ").encode("utf-8", "replace")


class TokenPieces:
    """Bytes and, where it is whole characters, text of every token id, worked out on first use.

    ``tokens``: the vocabulary's own spelling by id, None for an id that stands for nothing. ``raw``: ids
    that stand for exactly their spelling (added and control tokens). ``read``: from spelling to bytes.
    An id outside gives nothing. Threads may share it: two of them at worst do the same work.
    """

    def __init__(self, tokens: Sequence[str | None], raw: frozenset[int], read: Callable[[str], bytes]) -> None:
        self.size = len(tokens)
        self._tokens = tokens
        self._raw = raw
        self._read = read
        self._bytes: list[bytes | None] = [None] * self.size
        self._texts: list[str | bool | None] = [False] * self.size

    def spelling(self, token_id: int) -> str | None:
        """Return the token as the vocabulary spells it, or None."""
        return self._tokens[token_id] if 0 <= token_id < self.size else None

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that the token adds to a text."""
        if not 0 <= token_id < self.size:
            return b""
        known = self._bytes[token_id]
        if known is None:
            token = self._tokens[token_id]
            if token is None:
                known = b""
            else:
                known = token.encode("utf-8", "replace") if token_id in self._raw else self._read(token)
            self._bytes[token_id] = known
        return known

    def text_of(self, token_id: int) -> str | None:
        """Return the token's text if it is made of whole characters, else None."""
        if not 0 <= token_id < self.size:
            return ""
        known = self._texts[token_id]
        if known is False:
            try:
                known = self.bytes_of(token_id).decode("utf-8")
            except UnicodeDecodeError:
                known = None
            self._texts[token_id] = known
        return known  # type: ignore[return-value]
