"""One request's generated tokens, read as text."""

from __future__ import annotations

from collections import deque

from kimicore.errors import InvalidRequest
from kimicore.sampling_params import SamplingParams
from kimicore.text.detokenizer import Detokenizer
from kimicore.text.stops import StopMatcher, StopStrings
from kimicore.text.tokenizer import Tokenizer

__all__ = ["TextJudge", "resolve_stops"]


def resolve_stops(tokenizer: Tokenizer, params: SamplingParams) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the stop strings to look for in the text, and the token ids that are stop strings by themselves.

    A stop string that is a special token's own text is matched by that token's id as well, since special
    tokens give no text where they are skipped.

    Raises :class:`~kimicore.InvalidRequest` for one that holds a special token among other text while these
    are skipped: it could never match.
    """
    specials = tokenizer.specials
    ids: dict[int, None] = {}
    for stop in params.stop:
        if stop in specials.ids:
            ids[specials.ids[stop]] = None
            continue
        inside = specials.spans(stop) if params.skip_special_tokens else ()
        if inside:
            token = stop[inside[0][0] : inside[0][1]]
            raise InvalidRequest(
                f"stop={stop!r}: it holds the special token {token!r}, which gives no text, so it could never match; "
                f"give {token!r} alone, or skip_special_tokens=False"
            )
    return tuple(params.stop), tuple(ids)


class TextJudge:
    """Keeps a choice's text and says when a stop string ends it.

    ``continues``: the tokens go on from their prompt's text, see :class:`Detokenizer`. Not for two threads
    at once, except that :meth:`take` may be called from a second one.

    Raises :class:`~kimicore.InvalidRequest` as :func:`resolve_stops` does.
    """

    __slots__ = (
        "_by_id",
        "_count",
        "_detokenizer",
        "_include",
        "_matcher",
        "_min_tokens",
        "_silent",
        "_texts",
        "matched",
    )

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, *, continues: bool = True) -> None:
        stops, ids = resolve_stops(tokenizer, params)
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens, continues=continues)
        self._matcher = StopMatcher(StopStrings(stops), params.include_stop) if stops else None
        self._by_id = {one: stop for one in ids if (stop := tokenizer.token_text(one)) is not None}
        ends = () if params.ignore_eos else tokenizer.eos_ids
        self._silent = frozenset((*ends, *params.stop_token_ids)) - self._by_id.keys()
        self._include = params.include_stop
        self._min_tokens = params.min_tokens
        self._count = 0
        self._texts: deque[str] = deque()
        self.matched: str | None = None

    def accept(self, token_id: int) -> str | None:
        """Take the next token; return the stop string that ends the text, or None.

        A stop string that is complete before ``min_tokens`` tokens were taken is let through. End tokens and
        stop ids give no text.
        """
        self._count += 1
        if self.matched is not None or token_id in self._silent:
            return self.matched
        armed = self._count >= self._min_tokens
        if token_id in self._by_id:
            return self._stopped_by_id(token_id) if armed else None
        text = self._detokenizer.push(token_id)
        if not text:
            return None
        if self._matcher is not None:
            text, self.matched = self._matcher.push(text, armed=armed)
        if text:
            self._texts.append(text)
        return self.matched

    def _stopped_by_id(self, token_id: int) -> str:
        self.finish()
        stop = self.matched = self._by_id[token_id]
        if self._include:
            self._texts.append(stop)
        return stop

    def take(self) -> str:
        """Return the text since the last call that may be shown, merged."""
        texts = self._texts
        return "".join([texts.popleft() for _ in range(len(texts))])

    def finish(self) -> None:
        """Release what was held back, for :meth:`take`: there are no more tokens. May be called twice."""
        if self.matched is not None:
            return
        text = self._detokenizer.finish()
        if self._matcher is not None:
            shown, _ = self._matcher.push(text, armed=False)
            text = shown + self._matcher.finish()
        if text:
            self._texts.append(text)
