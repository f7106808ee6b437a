"""What a session's last prompt was, and whether it says what it should."""

from __future__ import annotations

from typing import Any

from kimicore import GenerationResult
from kimicore.text.chat import render_text

__all__ = ["full_blocks", "is_exact", "prompt_of"]

BLOCK = 16


def prompt_of(session: Any, result: GenerationResult) -> tuple[int, ...]:
    """Return the token ids of the prompt that ``result`` is the reply to, the session's last."""
    ids: tuple[int, ...] = session.token_ids
    return ids[: len(ids) - len(result.token_ids)]


def is_exact(engine: Any, session: Any, result: GenerationResult, **render: Any) -> bool:
    """Whether the last prompt says exactly what the template makes of the messages before the reply."""
    tokenizer = engine.face.tokenizer
    text, mark = render_text(tokenizer, session.messages[:-1], **render)
    said: str = tokenizer.decode(prompt_of(session, result), skip_special=False)
    return said == text.replace(mark, "")


def full_blocks(tokens: int) -> int:
    """Return the tokens of full blocks after a turn that ended with so many: the last one was never computed."""
    return max(0, tokens - 1) // BLOCK * BLOCK
