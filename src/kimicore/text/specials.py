"""Finding the texts of special tokens inside other text."""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["SpecialTexts"]


class SpecialTexts:
    """The texts of special tokens, found leftmost and longest first, as a tokenizer matches them.

    ``texts`` maps each text to its token id. Looking up lengths at the first letters keeps a vocabulary
    with thousands of special tokens cheap, where one large pattern would take long to build.
    """

    def __init__(self, texts: Mapping[str, int]) -> None:
        self.ids = {text: token_id for text, token_id in texts.items() if text}
        lengths: dict[str, set[int]] = {}
        for text in self.ids:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(sizes, reverse=True) for first, sizes in lengths.items()}
        self._first = re.compile("[" + "".join(map(re.escape, lengths)) + "]") if lengths else None

    def at(self, text: str, start: int) -> tuple[int, int] | None:
        """Return ``(end, token id)`` of the special token whose text begins at ``start``, or None."""
        for length in self._lengths.get(text[start : start + 1], ()):
            token_id = self.ids.get(text[start : start + length])
            if token_id is not None:
                return start + length, token_id
        return None

    def spans(self, text: str) -> list[tuple[int, int, int]]:
        """Return ``(start, end, token id)`` of every special token's text in ``text``, in order."""
        found: list[tuple[int, int, int]] = []
        end = 0
        for match in self._first.finditer(text) if self._first else ():
            if match.start() >= end and (hit := self.at(text, match.start())):
                end = hit[0]
                found.append((match.start(), end, hit[1]))
        return found
