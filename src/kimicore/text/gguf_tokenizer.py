"""A tokenizer rebuilt from the vocabulary in a GGUF file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from attrs import frozen
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from kimicore.errors import ModelLoadError
from kimicore.text.pieces import BYTE_PIECE, CHAR_OF, TokenPieces, byte_level_piece, sentencepiece_piece, spell
from kimicore.text.pretokenizers import pre_tokenizer
from kimicore.text.source import GGUFVocabulary

__all__ = ["Parts", "parts_from_gguf"]

UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6
MAX_TOKENS = 1 << 22
_SPACE = "\u2581"


@frozen(eq=False)
class Parts:
    """What a :class:`~kimicore.text.tokenizer.Tokenizer` is made of.

    ``parsing`` matches special tokens in text, ``plain`` takes their text as ordinary text; they share a
    model. ``pieces`` is None where only the library's own decoder can tell a token's text. ``special``: id by
    text of the special tokens, ``added`` of these and the user-defined ones. ``space_prefix``: the caller puts
    a space before text that does not begin with an added token. ``strip_space``: decoding takes one leading
    space away. ``cuttable``: text may be cut before a space between two letters without changing its ids.
    ``longest``: most characters that one token stands for, 0 where that is unbounded; ``longest_bytes`` the
    same in UTF-8 bytes.
    """

    parsing: Tokenizer
    plain: Tokenizer
    pieces: TokenPieces | None
    vocab_size: int
    special: dict[str, int]
    added: dict[str, int]
    unknown_id: int | None
    space_prefix: bool
    strip_space: bool
    cuttable: bool
    longest: int
    longest_bytes: int


def parts_from_gguf(vocabulary: GGUFVocabulary, ends: Iterable[int]) -> Parts:
    """Build both kinds of a GGUF vocabulary: "gpt2" (byte-level BPE) and "llama" (SentencePiece BPE).

    ``ends``: ids that begin or end a text; where the file calls one of them user defined it is special all
    the same, so that a user's text cannot end a conversation.

    Raises :class:`~kimicore.ModelLoadError` that names the field.
    """
    tokens, types = list(vocabulary.tokens), list(vocabulary.types)
    types = types or [1] * len(tokens)
    _check_sizes(vocabulary, tokens, types)
    for end in ends:
        if 0 <= end < len(tokens) and types[end] == USER_DEFINED:
            types[end] = CONTROL
    if vocabulary.model == "gpt2":
        return _byte_level(vocabulary, tokens, types)
    if vocabulary.model == "llama":
        return _sentencepiece(vocabulary, tokens, types)
    raise ModelLoadError(f"tokenizer.ggml.model={vocabulary.model!r}: not supported; known are 'gpt2' and 'llama'")


def _check_sizes(vocabulary: GGUFVocabulary, tokens: Sequence[str], types: Sequence[int]) -> None:
    if not tokens or len(tokens) > MAX_TOKENS:
        raise ModelLoadError(f"tokenizer.ggml.tokens: {len(tokens)} tokens, must be from 1 to {MAX_TOKENS}")
    if len(types) != len(tokens):
        raise ModelLoadError(f"tokenizer.ggml.token_type: {len(types)} entries for {len(tokens)} tokens")
    if vocabulary.scores is not None and len(vocabulary.scores) != len(tokens):
        raise ModelLoadError(f"tokenizer.ggml.scores: {len(vocabulary.scores)} entries for {len(tokens)} tokens")


def _byte_level(vocabulary: GGUFVocabulary, tokens: list[str], types: list[int]) -> Parts:
    way = pre_tokenizer(vocabulary.pre)
    letters = frozenset(CHAR_OF.values())
    raw = frozenset(i for i, kind in enumerate(types) if kind in (UNKNOWN, CONTROL, USER_DEFINED))
    keys = [token if i in raw or letters.issuperset(token) else spell(token.encode()) for i, token in enumerate(tokens)]
    vocab = {key: i for i, key in enumerate(keys)}
    merges = _listed_merges(vocabulary.merges)
    model = _model(vocab, merges, unk_token=None, ignore_merges=way.whole_words)
    parsing, plain = Tokenizer(model), Tokenizer(model)
    for one in (parsing, plain):
        if way.nfc:
            one.normalizer = way.normalizer()
        one.pre_tokenizer = way.build()
        one.decoder = decoders.ByteLevel()
    special, added = _add_tokens(parsing, plain, tokens, types, vocab)
    longest = max(max(map(len, keys)), max(len(tokens[i].encode()) for i in raw) if raw else 0)
    return Parts(
        parsing=parsing,
        plain=plain,
        pieces=TokenPieces(keys, raw, byte_level_piece),
        vocab_size=len(tokens),
        special=special,
        added=added,
        unknown_id=None,
        space_prefix=False,
        strip_space=False,
        cuttable=not any(" " in text for text in added),
        longest=longest * (3 if way.nfc else 1),
        longest_bytes=longest * (3 if way.nfc else 1),
    )


def _sentencepiece(vocabulary: GGUFVocabulary, tokens: list[str], types: list[int]) -> Parts:
    # Runs of spaces stand with real spaces in Gemma's files, while text reaches the model with the visible mark.
    keys = [token.replace(" ", _SPACE) if " " in token and not token.strip() else token for token in tokens]
    vocab = {key: i for i, key in enumerate(keys)}
    unknown = next((i for i, kind in enumerate(types) if kind == UNKNOWN), vocab.get("<unk>"))
    _check_bytes(tokens, types, unknown)
    merges = _listed_merges(vocabulary.merges) or _implied_merges(vocabulary, keys, types, vocab)
    model = _model(
        vocab, merges, unk_token=None if unknown is None else keys[unknown], fuse_unk=True, byte_fallback=True
    )
    parsing, plain = Tokenizer(model), Tokenizer(model)
    strip = vocabulary.add_space_prefix
    for one in (parsing, plain):
        one.normalizer = normalizers.Replace(" ", _SPACE)
        steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        one.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    special, added = _add_tokens(parsing, plain, tokens, types, vocab)
    raw = frozenset(i for i, kind in enumerate(types) if kind in (UNKNOWN, CONTROL, USER_DEFINED) and keys[i] in added)
    joined = "\n".join(keys)
    return Parts(
        parsing=parsing,
        plain=plain,
        pieces=TokenPieces(keys, raw, sentencepiece_piece),
        vocab_size=len(tokens),
        special=special,
        added=added,
        unknown_id=unknown,
        space_prefix=vocabulary.add_space_prefix,
        strip_space=strip,
        # A merge across a word's end would need a token that holds one.
        cuttable=re.search("[A-Za-z]" + _SPACE, joined) is None and not any(" " in text for text in added),
        longest=max(map(len, keys)),
        longest_bytes=max(map(len, map(str.encode, keys))),
    )


def _check_bytes(tokens: Sequence[str], types: Sequence[int], unknown: int | None) -> None:
    """Refuse a byte piece that names no byte, two for one byte, and a vocabulary that would drop text."""
    seen: dict[int, int] = {}
    for i, token in enumerate(tokens):
        if types[i] != BYTE and (token[:3] != "<0x" or types[i] in (UNKNOWN, CONTROL, USER_DEFINED)):
            continue
        found = BYTE_PIECE.fullmatch(token)
        if found is None:
            if types[i] == BYTE:
                raise ModelLoadError(f"tokenizer.ggml.tokens[{i}]={token!r}: a byte piece is written <0x00> to <0xFF>")
            continue
        byte = int(found[1], 16)
        if byte in seen:
            raise ModelLoadError(f"tokenizer.ggml.tokens[{i}]={token!r}: byte {byte} is also token {seen[byte]}")
        seen[byte] = i
    if unknown is None and len(seen) < 256:
        missing = next(byte for byte in range(256) if byte not in seen)
        raise ModelLoadError(
            f"tokenizer.ggml.tokens: no piece for byte {missing:#04x} and no unknown token; text would be lost"
        )


def _listed_merges(merges: Sequence[str]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for i, merge in enumerate(merges):
        at = merge.find(" ", 1)
        if at < 1 or at == len(merge) - 1:
            raise ModelLoadError(f"tokenizer.ggml.merges[{i}]={merge!r}: must be two tokens and a space between")
        pairs.append((merge[:at], merge[at + 1 :]))
    return pairs


def _implied_merges(
    vocabulary: GGUFVocabulary, keys: Sequence[str], types: Sequence[int], vocab: dict[str, int]
) -> list[tuple[str, str]]:
    """Return every pair of tokens that joins to a token, best first.

    SentencePiece joins the pair whose result has the best score. Where the scores of normal tokens fall
    with their ids, the ids give the same order, and they also rank tokens that carry no score of their own
    (Gemma's runs of spaces and lines, which came first in training).
    """
    scores = vocabulary.scores
    if scores is not None:
        normal = [score for score, kind in zip(scores, types, strict=True) if kind == 1]
        if any(left <= right for left, right in pairwise(normal)):
            return _ranked_merges(scores, keys, types, vocab)
    pairs: list[tuple[str, str]] = []
    add, find = pairs.append, vocab.get
    for key, kind in zip(keys, types, strict=True):
        if kind in (UNKNOWN, CONTROL, BYTE):  # such a token comes from its own text only, never from merging
            continue
        for at in range(len(key) - 1, 0, -1):
            if (left := find(key[:at])) is not None and (right := find(key[at:])) is not None:
                add((keys[left], keys[right]))  # the strings that are there already: half a million pairs share them
    return pairs


def _ranked_merges(
    scores: Sequence[float], keys: Sequence[str], types: Sequence[int], vocab: dict[str, int]
) -> list[tuple[str, str]]:
    pairs: list[tuple[float, int, int, str, str]] = []
    for score, kind, key in zip(scores, types, keys, strict=True):
        if kind in (UNKNOWN, CONTROL, BYTE):
            continue
        for at in range(len(key) - 1, 0, -1):
            left, right = key[:at], key[at:]
            if left in vocab and right in vocab:
                pairs.append((-score, -at, at - len(key), left, right))
    pairs.sort(key=lambda pair: pair[:3])
    return [pair[3:] for pair in pairs]


def _model(vocab: dict[str, int], merges: list[tuple[str, str]], **settings: Any) -> Any:
    try:
        return models.BPE(vocab=vocab, merges=merges, **settings)
    except Exception as error:  # the library raises a plain Exception
        raise ModelLoadError(f"tokenizer.ggml.merges: the vocabulary cannot be built from them: {error}") from error


def _add_tokens(
    parsing: Tokenizer, plain: Tokenizer, tokens: Sequence[str], types: Sequence[int], vocab: dict[str, int]
) -> tuple[dict[str, int], dict[str, int]]:
    """Register special and user-defined tokens with both tokenizers; return the special ones, and all."""
    special: dict[str, int] = {}
    added: dict[str, int] = {}
    batch: list[AddedToken] = []
    for i, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind not in (UNKNOWN, CONTROL, USER_DEFINED) or not token or vocab.get(token) != i:
            continue
        added[token] = i
        if kind != USER_DEFINED:
            special[token] = i
        batch.append(AddedToken(token, normalized=False, special=kind != USER_DEFINED))
    for one in (parsing, plain):
        one.add_tokens(batch)
    plain.encode_special_tokens = True
    return special, added
