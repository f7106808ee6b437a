"""A conversation to token ids, through the model's own template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2

from kimicore.errors import InvalidRequest, PromptTooLong
from kimicore.text.sandbox import Budget, TemplateSandbox
from kimicore.text.specials import SpecialTexts
from kimicore.text.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "encode_chat",
    "encode_rest",
    "plain_messages",
    "plain_variables",
    "render_chat",
    "render_text",
]

MAX_TEMPLATE_CHARS = 1 << 20
MAX_DEPTH = 32
MAX_KEPT = 8
SLACK, MIN_SLACK_TOKENS = 4, 1_024  # a template may drop some of what it is given, thoughts of old answers for one
_FIRST_MARK, _LAST_MARK = 0x10FFFD, 0x100000  # private use: no text has them all
"""Written into special tokens' texts in messages, so that they can be told from the template's own."""


class ChatTemplate:
    """A compiled chat template; raises :class:`~kimicore.InvalidRequest` where it cannot be compiled."""

    def __init__(self, source: str) -> None:
        if not isinstance(source, str) or len(source) > MAX_TEMPLATE_CHARS:
            raise InvalidRequest(f"chat template: must be a string of at most {MAX_TEMPLATE_CHARS} characters")
        self.source = source
        self._sandbox = TemplateSandbox()
        try:
            self._template = self._sandbox.from_string(source)
        except (jinja2.TemplateError, SyntaxError, RecursionError, ValueError, MemoryError, TypeError) as error:
            raise InvalidRequest(f"chat template: it does not compile: {error}") from error

    def render(self, variables: Mapping[str, Any], given_chars: int = 0) -> str:
        """Return the template's text; raises :class:`~kimicore.InvalidRequest` with its own reason where it refuses."""
        messages = len(variables.get("messages") or ())
        budget = Budget(steps=200_000 + 500 * messages, chars=(32 << 20) + 64 * given_chars)
        try:
            return self._sandbox.render(self._template, variables, budget)
        except Exception as error:  # a template may raise anything: dividing by zero, adding text to a number
            reason = str(error) or type(error).__name__
            raise InvalidRequest(f"chat template: {reason}; check the messages against what it expects") from error


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    template: str | None = None,
    add_generation_prompt: bool = True,
    max_tokens: int | None = None,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the token ids of a conversation.

    ``messages``: mappings with a string ``role`` and a ``content`` that is a string or a list of
    ``{"type": "text", "text": ...}`` parts, which are joined as they are; further fields go to the template
    untouched. ``template``: Jinja source to use in place of the model's own.
    ``add_generation_prompt``: end with the beginning of an answer. ``variables``: more names for the
    template, ``tools`` for example, made of plain strings, numbers, lists and mappings. ``max_tokens``: most
    ids to return.

    Special tokens that the template writes are parsed; in messages and variables their text stays text. A model
    whose texts begin with a begin token gets exactly one, whether the template writes it or not.

    Raises :class:`~kimicore.InvalidRequest` (no template, a malformed message, a template that refuses or does
    too much) and :class:`~kimicore.PromptTooLong`.
    """
    text, mark = render_text(
        tokenizer,
        messages,
        template=template,
        add_generation_prompt=add_generation_prompt,
        max_tokens=max_tokens,
        variables=variables,
    )
    return encode_chat(tokenizer, text, mark, max_tokens=max_tokens)


def encode_chat(tokenizer: Tokenizer, text: str, mark: str, *, max_tokens: int | None = None) -> list[int]:
    """Return the ids of a whole conversation as :func:`render_text` writes it; raises PromptTooLong."""
    if not mark:
        ids = tokenizer.encode(text, parse_special=True, max_tokens=max_tokens)
    else:
        ids = tokenizer.encode_marked(text, mark, max_tokens=max_tokens)
    bos = tokenizer.bos_id
    if tokenizer.add_bos and bos is not None:
        while ids[:2] == [bos, bos]:
            del ids[0]
        if ids[:1] != [bos]:
            ids.insert(0, bos)
    if max_tokens is not None and len(ids) > max_tokens:
        raise _too_long(len(ids), max_tokens, "")
    return ids


def encode_rest(tokenizer: Tokenizer, text: str, mark: str, *, max_tokens: int | None = None) -> list[int] | None:
    """Return the ids of what is left of a conversation's text after some whole tokens.

    None where they would not say exactly that text after others: a tokenizer may begin every text with a space, or
    change some letters. Raises PromptTooLong.
    """
    if not mark:
        ids = tokenizer.encode(text, parse_special=True, add_bos=False, max_tokens=max_tokens)
    else:
        ids = tokenizer.encode_marked(text, mark, max_tokens=max_tokens)
    said = b"".join([tokenizer.token_bytes(one) for one in ids])
    return ids if said == text.replace(mark, "").encode() else None


def _too_long(tokens: int, limit: int, least: str) -> PromptTooLong:
    return PromptTooLong(
        f"the conversation has {least}{tokens} tokens and at most {limit} fit; leave earlier messages out",
        prompt_tokens=tokens,
        limit_tokens=limit,
    )


def render_text(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    template: str | None = None,
    add_generation_prompt: bool = True,
    max_tokens: int | None = None,
    variables: Mapping[str, Any] | None = None,
) -> tuple[str, str]:
    """Return a conversation as text, and the mark that stands inside special tokens' texts of the messages ("": none).

    Takes and raises what :func:`render_chat` does.
    """
    source = template if template is not None else tokenizer.chat_template
    if source is None:
        raise InvalidRequest(
            "this model has no chat template: give one as template=, or write the prompt yourself and use generate()"
        )
    if not isinstance(add_generation_prompt, bool):
        raise InvalidRequest(f"add_generation_prompt={add_generation_prompt!r}: must be True or False")
    checked = plain_messages(_listed(messages))
    more = plain_variables({} if variables is None else variables)
    names = _token_names(tokenizer)
    for name in more:
        if not name.isidentifier() or name in ("messages", "add_generation_prompt", *names):
            raise InvalidRequest(f"variables: {name!r} is not a name that a caller may set")
    given = "".join(_strings([checked, more]))
    least = tokenizer.least_tokens(given)
    if max_tokens is not None and least > SLACK * (max_tokens + MIN_SLACK_TOKENS):
        raise _too_long(least, max_tokens, "at least ")
    mark = ""
    if tokenizer.specials.spans(given):
        mark = _free_mark(given, source)
        checked, more = _marked(checked, tokenizer.specials, mark), _marked(more, tokenizer.specials, mark)
    defaults = {"tools": None, "documents": None, **names, "add_generation_prompt": add_generation_prompt}
    text = _compiled(tokenizer, source).render({**defaults, **more, "messages": checked}, len(given))
    return text, mark


def _compiled(tokenizer: Tokenizer, source: str) -> ChatTemplate:
    kept = tokenizer.templates
    template = kept.get(source)
    if not isinstance(template, ChatTemplate):
        template = ChatTemplate(source)
        if len(kept) >= MAX_KEPT:
            kept.clear()
        kept[source] = template
    return template


def _token_names(tokenizer: Tokenizer) -> dict[str, str]:
    ids = {"bos_token": tokenizer.bos_id, "pad_token": tokenizer.pad_id}
    ids["eos_token"] = tokenizer.eos_ids[0] if tokenizer.eos_ids else None
    found = {name: tokenizer.token_text(one) for name, one in ids.items() if one is not None}
    return {name: text for name, text in found.items() if text is not None}


def _listed(messages: Any) -> Sequence[Any]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidRequest(f"messages: must be a list of mappings, not {type(messages).__name__}")
    if not messages:
        raise InvalidRequest("messages: must hold at least one message")
    return messages


def plain_messages(messages: Sequence[Any], start: int = 0) -> list[dict[str, Any]]:
    """Return copies of messages made of plain values, their text parts joined; ``start``: number of the first.

    Raises :class:`~kimicore.InvalidRequest` that names the message and the field.
    """
    return [_message(i, one) for i, one in enumerate(messages, start)]


def plain_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a template's variables made of plain values, or raise :class:`~kimicore.InvalidRequest`."""
    if not isinstance(variables, Mapping):
        raise InvalidRequest(f"variables: must map names to values, not {type(variables).__name__}")
    plain: dict[str, Any] = _plain("variables", variables)
    return plain


def _message(i: int, message: Any) -> dict[str, Any]:
    name = f"messages[{i}]"
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{name}: must be a mapping with role and content, not {type(message).__name__}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{name}['role']={role!r}: must be a string such as 'user'")
    if isinstance(content, Sequence) and not isinstance(content, (str, bytes, bytearray)):
        content = "".join(_part(f"{name}['content'][{k}]", part) for k, part in enumerate(content))
    elif content is None and message.get("tool_calls"):
        pass  # an answer that only calls tools has no text
    elif not isinstance(content, str):
        kind = type(content).__name__
        raise InvalidRequest(f"{name}['content']: must be a string or a list of text parts, not {kind}")
    rest = _plain(name, {key: value for key, value in message.items() if key not in ("role", "content")})
    return {"role": role, "content": content, **rest}


def _part(name: str, part: Any) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{name}: must be {{'type': 'text', 'text': '...'}}; other kinds of content are not taken")
    return str(part["text"])


def _plain(name: str, value: Any, depth: int = 0) -> Any:
    """Return a copy made of plain values only, so that a template is handed no object of the application's."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if depth < MAX_DEPTH and isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise InvalidRequest(f"{name}: the keys of a mapping must be strings")
        return {str(key): _plain(f"{name}[{key!r}]", one, depth + 1) for key, one in value.items()}
    if depth < MAX_DEPTH and isinstance(value, (list, tuple)):
        return [_plain(f"{name}[{i}]", one, depth + 1) for i, one in enumerate(value)]
    kind = f"nested more than {MAX_DEPTH} deep" if depth >= MAX_DEPTH else type(value).__name__
    raise InvalidRequest(f"{name}: must be made of strings, numbers, lists and mappings, not {kind}")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, one in value.items():
            yield key
            yield from _strings(one)
    elif isinstance(value, list):
        for one in value:
            yield from _strings(one)


def _free_mark(given: str, source: str) -> str:
    taken = {*given, *source}
    for code in range(_FIRST_MARK, _LAST_MARK, -1):
        if chr(code) not in taken:
            return chr(code)
    raise InvalidRequest("messages: every private-use character is taken; leave one out")


def _marked(value: Any, specials: SpecialTexts, mark: str) -> Any:
    """Return a copy in which no string holds a special token's text: the mark stands after its first letter."""
    if isinstance(value, str):
        pieces, start = [], 0
        for begin, _, _ in specials.spans(value):
            pieces.append(value[start : begin + 1])
            start = begin + 1
        return mark.join([*pieces, value[start:]])
    if isinstance(value, dict):
        return {key: _marked(one, specials, mark) for key, one in value.items()}
    if isinstance(value, list):
        return [_marked(one, specials, mark) for one in value]
    return value
