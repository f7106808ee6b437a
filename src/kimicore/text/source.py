"""What a model file says about its text side, as read, before a tokenizer is built from it."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

__all__ = ["GGUFVocabulary", "TextSource"]


@frozen(eq=False)
class GGUFVocabulary:
    """The vocabulary in a GGUF file's ``tokenizer.ggml.*`` keys.

    ``model``: "gpt2" (byte-level BPE) or "llama" (SentencePiece). ``pre``: name of the pre-tokenizer, ""
    where the file names none. ``tokens``: text of each token id. ``scores``: one per token, None where the
    file has none. ``types``: one per token: 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused,
    6 byte. ``merges``: "left right" pairs, best first; empty for SentencePiece. ``add_space_prefix``: a
    space goes before the text (SentencePiece).

    The sequences may decode lazily and are all checked: text is valid UTF-8, lengths agree.
    """

    model: str
    pre: str
    tokens: Sequence[str]
    scores: Sequence[float] | None
    types: Sequence[int]
    merges: Sequence[str]
    add_space_prefix: bool


@frozen(eq=False)
class TextSource:
    """Everything that a tokenizer and a chat template are built from.

    Exactly one of ``tokenizer_json`` (content of a ``tokenizer.json``) and ``gguf`` is set. ``eos_ids``
    holds every id that ends a text: the tokenizer's, the generation config's, a GGUF's end of turn.
    ``add_bos`` and ``add_eos``: what the model's files ask for around a plain prompt.
    """

    tokenizer_json: bytes | None
    gguf: GGUFVocabulary | None
    chat_template: str | None
    bos_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int | None
    add_bos: bool
    add_eos: bool = False
