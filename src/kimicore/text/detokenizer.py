"""Token ids to text as they come, never part of a character."""

from __future__ import annotations

import codecs
from collections.abc import Callable

from kimicore.text.tokenizer import Tokenizer

__all__ = ["Detokenizer"]

_utf8: Callable[[str], codecs.IncrementalDecoder] = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Turns one sequence of token ids into text, a token at a time.

    ``skip_special``: special tokens give no text. ``continues``: the ids go on from a text before them, so that a
    space at their start is real and stays; without it some SentencePiece models' first space is dropped,
    as :meth:`Tokenizer.decode` does.

    What :meth:`push` and :meth:`finish` return, joined, equals ``decode`` of the same ids. Bytes that cannot
    be part of a character read as U+FFFD at once; a character that is still incomplete when the sequence ends
    reads as one U+FFFD, from :meth:`finish`.
    """

    __slots__ = ("_decoder", "_hidden", "_open", "_pieces", "_strip", "_window")

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, *, continues: bool = False) -> None:
        self._hidden = tokenizer.special_ids if skip_special else frozenset()
        self._pieces = tokenizer.pieces
        self._decoder = _utf8("replace")
        self._open = False
        self._strip = tokenizer.strips_space and not continues
        self._window = _Window(tokenizer) if self._pieces is None else None

    def push(self, token_id: int) -> str:
        """Take the next id; return the text that is now complete, often the token's own, sometimes nothing."""
        if token_id in self._hidden:
            return ""
        pieces = self._pieces
        if pieces is None:
            assert self._window is not None
            return self._window.push(token_id)
        text = None if self._open else pieces.text_of(token_id)
        if text is None:
            text = self._decoder.decode(pieces.bytes_of(token_id))
            self._open = bool(self._decoder.getstate()[0])
        if self._strip and text:
            self._strip = False
            return text[1:] if text[0] == " " else text
        return text

    def finish(self) -> str:
        """Return what is left: one U+FFFD where the last character is incomplete, else nothing."""
        if self._window is not None:
            return self._window.finish()
        self._open = False
        return self._decoder.decode(b"", final=True)


class _Window:
    """Text by the library's own decoder, over the few ids since the last complete text."""

    __slots__ = ("_done", "_ids", "_read", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._read = 0  # ids whose text has been given; they stay as context for the next
        self._done = ""

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._tokenizer.library_decode(self._ids, skip_special=False)
        if text.endswith("\ufffd") and len(self._ids) - self._read < 8:  # no character has more tokens than that
            return ""
        return self._give(text)

    def finish(self) -> str:
        return self._give(self._tokenizer.library_decode(self._ids, skip_special=False))

    def _give(self, text: str) -> str:
        new = text[len(self._done) :]
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        self._done = self._tokenizer.library_decode(self._ids, skip_special=False)
        return new
