"""Stop strings, against the plainest way of finding them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimicore import InvalidRequest
from kimicore.text.stops import MAX_STOP_CHARS, StopMatcher, StopStrings


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Look for every stop string after every character."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def feed(matcher: StopMatcher, parts: list[str]) -> tuple[list[str], str | None]:
    """Return what each part lets through, with the tail, and the match."""
    shown = []
    for part in parts:
        text, stop = matcher.push(part)
        shown.append(text)
        if stop is not None:
            return shown, stop
    return [*shown, matcher.finish()], None


LETTERS = st.text("ab<", max_size=8)


@given(
    parts=st.lists(LETTERS, max_size=20),
    stops=st.lists(st.text("ab<", min_size=1, max_size=6), max_size=5),
    include=st.booleans(),
)
def test_matches_the_naive_search(parts: list[str], stops: list[str], include: bool) -> None:
    """Wherever the text is cut into pieces, the text let through and the match are those of the naive search."""
    shown, stop = feed(StopMatcher(stops, include), parts)
    assert ("".join(shown), stop) == naive("".join(parts), stops, include)


@given(text=st.text("ab", max_size=40), stops=st.lists(st.text("ab", min_size=1, max_size=6), max_size=4))
def test_holds_back_only_what_can_begin_a_stop(text: str, stops: list[str]) -> None:
    """After every character, exactly the longest end that begins some stop string is held back."""
    matcher, shown = StopMatcher(stops), ""
    for at, char in enumerate(text):
        emitted, stop = matcher.push(char)
        if stop is not None:
            return
        shown += emitted
        seen = text[: at + 1]
        ends = [seen[len(seen) - n :] for n in range(1, len(seen) + 1)]
        held = max((len(end) for end in ends if any(stop.startswith(end) for stop in stops)), default=0)
        assert shown == seen[: len(seen) - held]


def test_no_piece_of_a_stop_is_shown() -> None:
    """vllm#3574: no part of a stop string is let through before the rest completes it."""
    shown, stop = feed(StopMatcher([" three four"]), [" one", " two", " three", " four", " five"])
    assert shown == [" one", " two", "", ""]
    assert stop == " three four"


def test_unlike_text_is_not_held_back() -> None:
    """vllm#11089: text that cannot begin a stop string is not delayed; what was held comes in full at the end."""
    matcher = StopMatcher(["@" * 40])
    assert [matcher.push(part)[0] for part in ("some", " text", " here")] == ["some", " text", " here"]
    assert matcher.push("x" + "@" * 39) == ("x", None)
    assert matcher.finish() == "@" * 39
    matcher = StopMatcher(["@" * 40])
    assert matcher.push("@" * 39 + "x@") == ("@" * 39 + "x", None)


def test_empty_stops_are_refused() -> None:
    """sgl-project/sglang#38712: an empty stop string is refused, no stop strings mean no stop."""
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["", "END"])
    assert StopMatcher([]).push("anything") == ("anything", None)


def test_stops_are_bounded() -> None:
    """Stop strings beyond any use are refused with the figures."""
    with pytest.raises(InvalidRequest, match=str(MAX_STOP_CHARS)):
        StopStrings(["x" * (MAX_STOP_CHARS + 1)])
    shown, stop = feed(StopMatcher(["a" * 8_000 + "b"]), ["a" * 50_000, "b"])
    assert (len("".join(shown)), len(stop or "")) == (42_000, 8_001)


def test_nothing_comes_after_a_match() -> None:
    """Once a stop string ended the text, further text gives nothing, and the match stays known."""
    matcher = StopMatcher(["ND", "END"], include=True)
    assert matcher.push("the END and more") == ("the END", "END")
    assert matcher.push("more") == ("", "END")
    assert matcher.finish() == ""


def test_passing_stops_go_through() -> None:
    """A stop string that ends while not armed is text; one that ends after that counts, wherever it began."""
    matcher = StopMatcher(["ab"])
    assert matcher.push("xab", armed=False) == ("xab", None)
    assert matcher.push("a", armed=False) == ("", None)
    assert matcher.push("b") == ("", "ab")


def test_matchers_share_their_stop_strings() -> None:
    """Several matchers over the same stop strings do not disturb each other."""
    stops = StopStrings(["ab"])
    one, two = StopMatcher(stops), StopMatcher(stops)
    one.push("a")
    assert two.push("b") == ("b", None)
    assert one.push("b") == ("", "ab")
