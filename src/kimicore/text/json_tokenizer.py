"""A tokenizer from the content of a ``tokenizer.json``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from tokenizers import Tokenizer

from kimicore.errors import ModelLoadError
from kimicore.text.gguf_tokenizer import Parts
from kimicore.text.pieces import TokenPieces, byte_level_piece, sentencepiece_piece

__all__ = ["parts_from_json"]

MAX_JSON_BYTES = 256 << 20
_MAX_IDS = 1 << 22
_SPACE = "\u2581"


def parts_from_json(content: bytes) -> Parts:
    """Read a ``tokenizer.json``.

    Raises :class:`~kimicore.ModelLoadError` where it is malformed or larger than any real one.
    """
    if len(content) > MAX_JSON_BYTES:
        raise ModelLoadError(f"tokenizer.json: {len(content)} bytes, at most {MAX_JSON_BYTES} are read")
    parsing = _read(content)
    size = 1 + max(parsing.get_vocab(with_added_tokens=True).values(), default=-1)
    if not 0 < size <= _MAX_IDS:
        raise ModelLoadError(f"tokenizer.json: token ids go up to {size - 1}; from 0 to {_MAX_IDS - 1} are taken")
    added = parsing.get_added_tokens_decoder()
    plain = _twin(parsing, added, content)
    plain.encode_special_tokens = True
    special = {token.content: i for i, token in added.items() if token.special}
    decoder, model = _state(parsing.decoder), parsing.model
    read, strip = _reading(decoder)
    vocab = parsing.get_vocab(with_added_tokens=True)
    longest, longest_bytes, cuttable = _bounds(parsing, added, vocab, read)
    pieces = None
    if read is not None:
        tokens: list[str | None] = [None] * size
        for token, i in vocab.items():
            tokens[i] = token
        pieces = TokenPieces(tokens, frozenset(special.values()), read)
    unknown = getattr(model, "unk_token", None)
    return Parts(
        parsing=parsing,
        plain=plain,
        pieces=pieces,
        vocab_size=size,
        special=special,
        added={token.content: i for i, token in added.items()},
        unknown_id=vocab.get(unknown) if isinstance(unknown, str) else None,
        space_prefix=False,  # its own pre-tokenizer adds one where it is wanted
        strip_space=strip,
        cuttable=cuttable,
        longest=longest,
        longest_bytes=longest_bytes,
    )


def _read(content: bytes) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_buffer(content)
        tokenizer.no_truncation()  # saved by whoever trained it; it would silently cut prompts
        tokenizer.no_padding()
    except BaseException as error:  # a fault inside the library arrives as its own BaseException
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ModelLoadError(f"tokenizer.json: {str(error)[:300]}") from None
        raise
    return tokenizer


def _twin(parsing: Tokenizer, added: Mapping[int, Any], content: bytes) -> Tokenizer:
    """Return a second tokenizer over the same model, which may then read special tokens as plain text."""
    twin = Tokenizer(parsing.model)
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        if (value := getattr(parsing, part)) is not None:
            setattr(twin, part, value)
    twin.add_tokens([added[i] for i in sorted(added)])
    if str(twin.get_added_tokens_decoder()) != str(added):  # ids of its own choosing: read the file again
        return _read(content)
    return twin


def _state(part: Any) -> Any:
    """Return a component's settings as the file spells them, or None."""
    return None if part is None else json.loads(part.__getstate__())


def _steps(state: Any, members: str) -> list[Mapping[str, Any]]:
    if state is None:
        return []
    if state.get("type") == "Sequence":
        return [step for one in state[members] for step in _steps(one, members)]
    return [state]


def _reading(decoder: Any) -> tuple[Callable[[str], bytes] | None, bool]:
    """Return how a token's bytes are read and whether one leading space is dropped, for decoders made of bytes."""
    steps = _steps(decoder, "decoders")
    kinds = [step["type"] for step in steps]
    if kinds in (["ByteLevel"], ["ByteLevel", "Fuse"]):
        return byte_level_piece, False
    if kinds[:2] == ["Replace", "ByteFallback"] and kinds[2:] in ([], ["Fuse"], ["Fuse", "Strip"]):
        spaces = steps[0].get("pattern") == {"String": _SPACE} and steps[0].get("content") == " "
        strip = steps[3] if len(steps) > 3 else {"content": " ", "start": 0, "stop": 0}
        if spaces and strip["content"] == " " and strip["start"] in (0, 1) and strip["stop"] == 0:
            return sentencepiece_piece, strip["start"] == 1
    return None, False


def _bounds(
    tokenizer: Tokenizer, added: Mapping[int, Any], vocab: Mapping[str, int], read: Callable[[str], bytes] | None
) -> tuple[int, int, bool]:
    """Return the most characters and bytes that a token stands for (0: no bound), and whether text may be cut."""
    normal = _steps(_state(tokenizer.normalizer), "normalizers")
    words = _steps(_state(tokenizer.pre_tokenizer), "pretokenizers")
    greedy = any(one.lstrip or one.rstrip or one.single_word for one in added.values())
    if type(tokenizer.model).__name__ != "BPE" or read is None or greedy or not vocab:
        return 0, 0, False
    composes = [step["type"] for step in normal] == ["NFC"]
    spaces = [
        step
        for step in normal
        if step["type"] == "Replace" and step["pattern"] == {"String": " "} and step["content"] == _SPACE
    ]
    if normal and not composes and spaces != normal:
        return 0, 0, False
    factor = 3 if composes else 1
    longest = max(map(len, vocab)) * factor
    longest_bytes = max(len(token.encode("utf-8", "replace")) for token in vocab) * factor
    inner = any(" " in token.content for token in added.values())
    if read is byte_level_piece:
        last = words[-1] if words else {}
        regular = all(step["type"] in ("Split", "Digits", "ByteLevel") for step in words)
        cuttable = regular and last.get("type") == "ByteLevel" and not last.get("add_prefix_space") and not inner
        return longest, longest, bool(cuttable and _no_word_end(vocab, "\u0120"))
    plain_words = all(step["type"] == "Split" and step["pattern"] == {"String": " "} for step in words)
    complete = all(f"<0x{byte:02X}>" in vocab for byte in range(256)) or not getattr(tokenizer.model, "fuse_unk", True)
    if not complete:
        return 0, 0, False
    return longest, longest_bytes, spaces == normal != [] and plain_words and not inner and _no_word_end(vocab, _SPACE)


def _no_word_end(vocab: Mapping[str, int], space: str) -> bool:
    """Whether no token holds a letter and a space after it, so that no merge crosses a word's end."""
    return not any(
        left.isascii() and left.isalpha()
        for token in vocab
        if space in token
        for left, right in pairwise(token)
        if right == space
    )
