"""Stop strings in a text that comes in pieces."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence

from kimicore.errors import InvalidRequest

__all__ = ["StopMatcher", "StopStrings"]

MAX_STOP_CHARS = 16_384


class StopStrings:
    """Some stop strings, made ready for matching; may be shared by any number of matchers.

    Raises :class:`~kimicore.InvalidRequest` for an empty stop string and for more than 16,384 characters
    in all. Source: A. V. Aho and M. J. Corasick, Efficient string matching (1975).
    """

    __slots__ = ("depths", "ends", "fallback", "first", "moves", "stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        if not all(self.stops):
            raise InvalidRequest(f"stop={self.stops!r}: an empty stop string would stop at once; leave it out")
        if (size := sum(map(len, self.stops))) > MAX_STOP_CHARS:
            raise InvalidRequest(f"stop: {size} characters in all, at most {MAX_STOP_CHARS} are taken")
        self.moves: list[dict[str, int]] = [{}]
        self.depths = [0]
        self.ends: list[str | None] = [None]  # the longest stop string that ends in a state
        for stop in self.stops:
            self._add(stop)
        self.fallback = self._fallbacks()
        self.first = re.compile("[" + "".join(re.escape(stop[0]) for stop in self.stops) + "]") if stops else None

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self.moves[state]:
                self.moves[state][char] = len(self.moves)
                self.moves.append({})
                self.depths.append(self.depths[state] + 1)
                self.ends.append(None)
            state = self.moves[state][char]
        self.ends[state] = stop

    def _fallbacks(self) -> list[int]:
        fallback = [0] * len(self.moves)
        queue = deque(self.moves[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self.moves[state].items():
                at = fallback[state]
                while at and char not in self.moves[at]:
                    at = fallback[at]
                fallback[child] = self.moves[at].get(char, 0)
                if self.ends[child] is None:
                    self.ends[child] = self.ends[fallback[child]]
                queue.append(child)
        return fallback


class StopMatcher:
    """Lets text through up to the first stop string, holding back only what may turn out to be one.

    ``stops``: the strings, or a :class:`StopStrings` of them. The one that ends first wins; of several that end
    together, the longest. ``include``: its text is let through as well. Time is linear in the text.
    """

    __slots__ = ("_held", "_include", "_state", "_stops", "matched")

    def __init__(self, stops: Sequence[str] | StopStrings, include: bool = False) -> None:
        self._stops = stops if isinstance(stops, StopStrings) else StopStrings(stops)
        self._include = include
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Take more text; return what may be shown now, and the stop string that ends it, or None.

        ``armed``: False lets stop strings that end in this text pass. After a match nothing is let through.
        """
        if self.matched is not None:
            return "", self.matched
        stops = self._stops
        state, start = self._state, 0
        if not state:
            found = stops.first.search(text) if stops.first else None
            if found is None:
                return text, None
            start = found.start()
        moves, fallback, ends = stops.moves, stops.fallback, stops.ends
        for at in range(start, len(text)):
            char = text[at]
            while (following := moves[state].get(char)) is None and state:
                state = fallback[state]
            state = following or 0
            if ends[state] is not None:
                if armed:
                    self.matched = ends[state]
                    return self._matched_text(text[: at + 1]), self.matched
                while state and not moves[state]:  # it has passed, and no longer stop string goes on from it
                    state = fallback[state]
        self._state = state
        whole = self._held + text
        shown = len(whole) - stops.depths[state]
        self._held = whole[shown:]
        return whole[:shown], None

    def _matched_text(self, text: str) -> str:
        assert self.matched is not None
        whole, self._held = self._held + text, ""
        return whole if self._include else whole[: len(whole) - len(self.matched)]

    def finish(self) -> str:
        """Return what is still held back: the text has ended and it was no stop string."""
        held, self._held, self._state = self._held, "", 0
        return held
