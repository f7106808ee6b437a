"""A conversation that goes on: its history, its next prompt's token ids, and what goes to disk. Nothing here waits.

The next prompt is what the template makes of all messages, as text; its first tokens are those of the turn before, as
far as they say the beginning of that text. So the KV of a reply is found again although its text, tokenized anew, might
give other tokens.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from kimicore.checks import integer
from kimicore.errors import InvalidRequest, KimiCoreError
from kimicore.face import Face, check_tenant
from kimicore.handle import Asked, Job, KVWish, SinkCall
from kimicore.intake import resolve_kv
from kimicore.sampling_params import SamplingParams
from kimicore.saved_turns import History, Saved, read_saved, write_saved
from kimicore.types import GenerationResult, Tier
from kimicore.wake import ThreadWaker, Waker

if TYPE_CHECKING:
    from kimicore.text.tokenizer import Tokenizer

__all__ = ["SavedSession", "Turn", "Turns", "new_messages"]

MOST_TURNS = 1 << 30


@frozen
class SavedSession:
    """What :meth:`kimicore.Session.save` wrote.

    ``path``: the file. ``turns``, ``tokens``: how long the conversation is. ``blocks``: KV blocks that it needs to go
    on, in all KV classes; ``stored_blocks`` of them are on disk. Without a disk tier, and where the time was over
    before the engine could tell, ``stored_blocks`` is 0 and ``blocks`` those of one class.
    """

    path: str
    turns: int
    tokens: int
    blocks: int
    stored_blocks: int


@frozen
class _Prompt:
    """A turn's prompt: its text with marks, its token ids, and the history that it goes on from."""

    history: History
    text: str
    token_ids: tuple[int, ...]


class Turns:
    """What the sessions of both faces share: one conversation, of which one turn at a time is on its way.

    ``history`` is never changed, only replaced. May be used from any thread.
    """

    def __init__(
        self,
        face: Face,
        tenant: str,
        template: str | None,
        variables: Mapping[str, Any],
        history: History,
        kv: KVWish,
        *,
        sink_after_turns: int,
        sink_turns: int,
    ) -> None:
        self.face = face
        self.kv = kv
        self.tenant, self.template, self.variables = tenant, template, variables
        self.history = history
        self.sink_after_turns, self.sink_turns = sink_after_turns, sink_turns
        # A turn may end in a finalizer, which may run wherever the lock is held already.
        self._lock = threading.RLock()
        self._turn: Turn | None = None

    @classmethod
    def of(
        cls,
        face: Face,
        *,
        tenant: str,
        template: str | None,
        template_variables: Mapping[str, Any] | None,
        messages: Sequence[Mapping[str, Any]],
        kv: KVWish,
        resume: str | os.PathLike[str] | None,
        sink_after_turns: int,
        sink_turns: int,
    ) -> Turns:
        """Return a conversation that begins with ``messages``, or goes on as the file ``resume`` says.

        Raises :class:`~kimicore.InvalidRequest` for wrong arguments and :class:`~kimicore.ConfigError` for a file that
        cannot be used.
        """
        from kimicore.text.chat import plain_messages, plain_variables

        check_tenant(tenant)
        own = resolve_kv(kv, face.config)
        if template is not None and not isinstance(template, str):
            raise InvalidRequest(f"template={template!r}: must be a Jinja template as text")
        if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
            raise InvalidRequest(f"messages: must be a list of mappings, not {type(messages).__name__}")
        variables: Mapping[str, Any] = plain_variables({} if template_variables is None else template_variables)
        after = integer("sink_after_turns", sink_after_turns, 0, MOST_TURNS, InvalidRequest)
        count = integer("sink_turns", sink_turns, 1, MOST_TURNS, InvalidRequest)
        history = History(tuple(plain_messages(messages)))
        if resume is not None:
            saved = read_saved(resume)
            given: dict[str, Any] = {
                "tenant": tenant,
                "template": template,
                "template_variables": variables,
                "messages": messages,
            }
            kept: dict[str, Any] = {
                "tenant": saved.tenant,
                "template": saved.template,
                "template_variables": saved.variables,
            }
            for name, value in given.items():
                if value and value != kept.get(name):
                    raise InvalidRequest(f"{name}: the session that is resumed has its own; leave {name} out")
            tenant, template, variables, history = saved.tenant, saved.template, saved.variables, saved.history
            # Another precision can be asked for: what was computed is not found then, and the text stays.
            precision = saved.precision if kv.domain is None and kv.precision is None else own.precision
            share = saved.share if kv.share is None else kv.share
            own = resolve_kv(KVWish(None, precision, share), face.config)
        return cls(face, tenant, template, variables, history, own, sink_after_turns=after, sink_turns=count)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """A copy of the messages so far."""
        return deepcopy(list(self.history.messages))

    def fork(self) -> Turns:
        """Return a conversation of its own that goes on from here; a turn on its way is not part of it."""
        return Turns(
            self.face,
            self.tenant,
            self.template,
            self.variables,
            self.history,
            self.kv,
            sink_after_turns=self.sink_after_turns,
            sink_turns=self.sink_turns,
        )

    # ------------------------------------------------------------ one turn

    def begin(self, turn: Turn) -> None:
        """Make ``turn`` the one that is on its way; raises :class:`~kimicore.InvalidRequest` where another one is."""
        with self._lock:
            if self._turn not in (None, turn):
                raise InvalidRequest(
                    "a session has one turn at a time: wait for the reply, close its stream, or go on in a fork()"
                )
            self._turn = turn

    def drop(self, turn: Turn) -> None:
        """End ``turn`` without a trace, unless it has ended already."""
        with self._lock:
            if self._turn is turn:
                self._turn = None

    def enter(self, turn: Turn, history: History) -> None:
        """End ``turn`` with ``history``, and have old turns written to disk; nobody waits for that."""
        with self._lock:
            if self._turn is not turn:
                return
            sunk = self._next_sunk(history)
            self.history, self._turn = evolve(history, sunk=sunk), None
        if sunk > history.sunk:
            # Their KV is a help and no more: where the engine closes meanwhile, nothing is lost but time.
            with suppress(KimiCoreError):
                self.face.loop.sink(self._sink_call(history, history.ends[sunk - 1], ThreadWaker()))

    def _next_sunk(self, history: History) -> int:
        """Return how many turns are to be on disk, or on their way there, from now on."""
        if self.face.config.kv_disk_dir is None or history.turns - history.sunk <= self.sink_after_turns:
            return history.sunk
        return min(history.turns, history.sunk + self.sink_turns)

    def _sink_call(self, history: History, tokens: int, waker: Waker) -> SinkCall:
        # Whole blocks only: a layer with a window needs those that the first query after them sees.
        whole = tokens - tokens % self.face.config.block_tokens
        return SinkCall(history.token_ids[:whole], history.prompt_tokens, self.tenant, self.kv.precision, waker)

    # ------------------------------------------------------------ saving

    def sink(self, history: History, waker: Waker) -> SinkCall | None:
        """Have all KV of ``history`` written to disk; None where there is no disk, or no engine that could."""
        if self.face.config.kv_disk_dir is None or not history.ends:
            return None
        try:
            if not self.face.opened or self.face.identity != (history.model, history.tokenizer):
                return None
            call = self._sink_call(history, history.ends[-1], waker)
            self.face.loop.sink(call)
        except KimiCoreError:
            return None
        return call

    def write(self, path: str | os.PathLike[str], history: History, call: SinkCall | None) -> SavedSession:
        """Write the file, whole or not at all; raises :class:`~kimicore.ConfigError` that names it and the reason."""
        where = write_saved(
            path, Saved(self.tenant, self.template, self.variables, history, self.kv.precision, self.kv.share)
        )
        tokens = len(history.token_ids)
        blocks, stored = tokens // self.face.config.block_tokens, 0
        if call is not None and call.done and call.error is None:
            blocks, stored = call.blocks, call.stored
        return SavedSession(where, history.turns, tokens, blocks, stored)


class Turn:
    """New messages on their way to a reply; the history changes when the reply is whole, or not at all."""

    def __init__(self, turns: Turns, messages: Sequence[dict[str, Any]]) -> None:
        self._turns = turns
        self._messages = tuple(messages)
        self._prompt: _Prompt | None = None

    def begin(self) -> None:
        """Take the session's place for this turn; raises :class:`~kimicore.InvalidRequest` where it is taken."""
        self._turns.begin(self)

    def drop(self) -> None:
        """End the turn without a trace, unless it has ended already; may be called at any time."""
        self._turns.drop(self)

    def job(
        self,
        params: SamplingParams | None,
        sampling: Mapping[str, Any],
        priority: int,
        tier: Tier,
        timeout_s: float | None,
    ) -> Job:
        """Check everything but the prompt; raises :class:`~kimicore.InvalidRequest`."""
        turns = self._turns
        asked = Asked(priority, tier, (), timeout_s, turns.tenant, None, keep=True, kv=turns.kv)
        job = turns.face.job(params, sampling, asked)
        if job.params.n != 1:
            raise InvalidRequest(f"n={job.params.n}: a turn of a session has one reply; fork() it for more")
        return job

    def prompt(self) -> Sequence[int]:
        """Return the prompt's token ids; raises what :meth:`kimicore.Engine.chat` does. Slow for a long history."""
        from kimicore.text.chat import render_text

        turns = self._turns
        loop = turns.face.loop
        history = turns.history.under(*turns.face.identity)
        if history.token_ids and max(history.token_ids) >= loop.vocab_tokens:
            raise InvalidRequest(f"token_ids: the resumed session has ids over the vocabulary's {loop.vocab_tokens}")
        text, mark = render_text(
            loop.tokenizer,
            [*history.messages, *self._messages],
            template=turns.template,
            max_tokens=loop.limit_tokens,
            variables=turns.variables,
        )
        ids = _next_ids(loop.tokenizer, history, text, mark, loop.limit_tokens)
        self._prompt = _Prompt(history, text, tuple(ids))
        return self._prompt.token_ids

    def enter(self, result: GenerationResult) -> None:
        """Put the messages and the reply into the history."""
        prompt = self._prompt
        assert prompt is not None
        before = prompt.history
        reply = {"role": "assistant", "content": result.text}
        ids = (*prompt.token_ids, *result.token_ids)
        same = _common(before.token_ids, ids)
        model, tokenizer = self._turns.face.identity
        # Turns whose tokens were made anew end somewhere in this prompt, and are not on disk in this form.
        ends = tuple([end if 0 < end <= same else len(prompt.token_ids) for end in before.ends])
        sunk = sum([0 < end <= same for end in before.ends[: before.sunk]])
        # The last token's KV was never computed.
        history = History(
            messages=(*before.messages, *self._messages, reply),
            token_ids=ids,
            prompt_tokens=len(prompt.token_ids),
            text=prompt.text,
            ends=(*ends, max(1, len(ids) - 1)),
            sunk=sunk,
            model=model,
            tokenizer=tokenizer,
        )
        self._turns.enter(self, history)


def new_messages(content: Any, role: str) -> list[dict[str, Any]]:
    """Return what a turn adds as messages: a text or text parts of ``role``, a message, or a list of messages.

    Raises :class:`~kimicore.InvalidRequest` that names what is wrong.
    """
    from kimicore.text.chat import plain_messages

    if isinstance(content, Mapping):
        return plain_messages([content])
    if isinstance(content, Sequence) and not isinstance(content, (str, bytes, bytearray)):
        if not content:
            raise InvalidRequest("content: must hold at least one message or text part")
        if any(isinstance(one, Mapping) and "role" in one for one in content):
            return plain_messages(content)
    return plain_messages([{"role": role, "content": content}])


def _next_ids(tokenizer: Tokenizer, history: History, text: str, mark: str, limit_tokens: int) -> list[int]:
    """Return the ids of a conversation's ``text``, beginning with the tokens of ``history`` that say its beginning."""
    from kimicore.text.chat import encode_chat, encode_rest

    if history.prompt_tokens and text.startswith(history.text):
        rest = text[len(history.text) :]
        generated = history.token_ids[history.prompt_tokens :]
        count, chars = _said(tokenizer, generated, history.messages[-1]["content"], rest)
        more = encode_rest(tokenizer, rest[chars:], mark, max_tokens=limit_tokens)
        if more is not None:
            return [*history.token_ids[: history.prompt_tokens + count], *more]
    return encode_chat(tokenizer, text, mark, max_tokens=limit_tokens)


def _said(tokenizer: Tokenizer, generated: Sequence[int], reply: str, rest: str) -> tuple[int, int]:
    """Return how many of a reply's tokens say the beginning of ``rest``, and how many characters that is.

    They say whole characters of the reply. A special token's text in it ends them: there only the mark in ``rest``
    tells whether the template means the token or its letters.
    """
    spans = tokenizer.specials.spans(reply)
    shown = reply[: spans[0][0]] if spans else reply
    wanted = shown[: _common(shown, rest)].encode("utf-8", "surrogatepass")
    count = size = whole = 0
    for at, token_id in enumerate(generated, 1):
        piece = tokenizer.token_bytes(token_id)
        if not piece or not wanted.startswith(piece, size):
            break
        size += len(piece)
        if not b"\x80" <= wanted[size : size + 1] < b"\xc0":  # no byte that goes on with a character
            count, whole = at, size
    return count, len(wanted[:whole].decode("utf-8", "surrogatepass"))


def _common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many items two sequences have in common at their beginning."""
    most = min(len(first), len(second))
    if first[:most] == second[:most]:
        return most
    return next(at for at in range(most) if first[at] != second[at])
