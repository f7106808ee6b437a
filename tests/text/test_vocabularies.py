"""Vocabularies as files bring them: small, odd and broken ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve

from kimicore import ModelLoadError
from kimicore.text.detokenizer import Detokenizer
from kimicore.text.pieces import CHAR_OF, spell
from kimicore.text.pretokenizers import PRE_TOKENIZERS, pre_tokenizer
from kimicore.text.source import GGUFVocabulary, TextSource
from kimicore.text.tokenizer import Tokenizer

Make = Callable[..., TextSource]


def byte_level(*more: tuple[str, int], merges: tuple[str, ...] = (), pre: str = "gpt-2") -> GGUFVocabulary:
    """Return a byte-level vocabulary of all bytes and ``more`` as (token, type)."""
    entries = [*((char, 1) for char in CHAR_OF.values()), *more]
    return GGUFVocabulary("gpt2", pre, [one for one, _ in entries], None, [kind for _, kind in entries], merges, False)


@pytest.mark.parametrize("name", ["<0x+7>", "<0xGG>", "<0x1FF>", "<0x>", "<0x 7>", "<0X41>", "<0x-1>", "<0x4_>"])
def test_malformed_byte_pieces(small_source: Make, name: str) -> None:
    """A byte piece that names no byte is a load error; a normal token of such a name is plain text."""
    with pytest.raises(ModelLoadError, match="byte piece"):
        Tokenizer.from_source(small_source((name, 6)))
    tokenizer = Tokenizer.from_source(small_source((name, 1), ("\u2581", 1)))
    assert tokenizer.token_bytes(259) == name.encode()
    assert tokenizer.decode(tokenizer.encode(name)) == name


@pytest.mark.parametrize("name", ["<0x41>", "<0x0a>"])
def test_a_byte_has_one_piece(small_source: Make, name: str) -> None:
    """Two pieces for one byte are a load error."""
    with pytest.raises(ModelLoadError, match="is also token"):
        Tokenizer.from_source(small_source((name, 6)))


def test_byte_names_in_text_are_text(small_source: Make) -> None:
    """Text that looks like a byte piece comes back as it was written."""
    tokenizer = Tokenizer.from_source(small_source(("\u2581", 1)))
    assert tokenizer.decode(tokenizer.encode("<0x41> <0x0A>")) == "<0x41> <0x0A>"
    assert tokenizer.token_bytes(3 + 0x41) == b"A"


def test_a_vocabulary_that_would_lose_text_is_refused() -> None:
    """Missing byte pieces without an unknown token would drop characters silently, so loading says so."""
    vocabulary = GGUFVocabulary("llama", "", ["a", "b", "ab"], [0.0, -1.0, -2.0], [1, 1, 1], (), False)
    source = TextSource(None, vocabulary, None, None, (), None, False)
    with pytest.raises(ModelLoadError, match="text would be lost"):
        Tokenizer.from_source(source)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("hi", ["\u2581hi"]),
        (" hi", ["\u2581", "\u2581hi"]),
        ("</s>hi", ["</s>", "hi"]),
        ("hi</s>hi", ["\u2581hi", "</s>", "hi"]),
    ],
)
def test_the_space_prefix(small_source: Make, text: str, tokens: list[str]) -> None:
    """A vocabulary that asks for it gets one space before the text, none after a special token, and loses it again."""
    pieces = [("\u2581", 1), ("h", 1), ("i", 1), ("hi", 1), ("\u2581hi", 1)]
    tokenizer = Tokenizer.from_source(small_source(*pieces, prefix=True))
    ids = tokenizer.encode(text, parse_special=True)
    assert [tokenizer.token_text(one) for one in ids] == tokens
    assert tokenizer.decode(ids, skip_special=False) == text
    detokenizer = Detokenizer(tokenizer, skip_special=False)
    assert "".join(map(detokenizer.push, ids)) + detokenizer.finish() == text


def test_generated_text_keeps_its_space(small_source: Make) -> None:
    """Text that goes on from a prompt keeps a space at its start where a whole text would drop it."""
    tokenizer = Tokenizer.from_source(small_source(("\u2581hi", 1), prefix=True))
    assert Detokenizer(tokenizer, continues=True).push(259) == " hi"
    assert Detokenizer(tokenizer).push(259) == "hi"


def test_scores_rank_the_merges(small_source: Make) -> None:
    """Where scores do not fall with the ids, the pair whose result scores best is joined first."""
    pieces = [("a", 1), ("b", 1), ("c", 1), ("ab", 1), ("bc", 1)]
    source = small_source(*pieces)
    assert source.gguf is not None
    plain = Tokenizer.from_source(source)
    assert [plain.token_text(i) for i in plain.encode("abc")] == ["ab", "c"]
    scores = [*source.gguf.scores[:-2], -9000.0, -8000.0]  # type: ignore[index]
    ranked = Tokenizer.from_source(evolve(source, gguf=evolve(source.gguf, scores=scores)))
    assert [ranked.token_text(i) for i in ranked.encode("abc")] == ["a", "bc"]


def test_user_defined_tokens_are_whole(small_source: Make) -> None:
    """User-defined tokens are matched whole in any text and are no special tokens."""
    tokenizer = Tokenizer.from_source(small_source(("<think>", 4)))
    assert 259 in tokenizer.encode("a<think>b")
    assert tokenizer.decode([259]) == "<think>"


def test_an_end_token_called_user_defined_is_special(small_source: Make) -> None:
    """A user's text cannot hold an end token, even where the file calls that token user defined."""
    tokenizer = Tokenizer.from_source(small_source(("<|end|>", 4), eos_ids=(259,)))
    assert 259 not in tokenizer.encode("a<|end|>b")
    assert 259 in tokenizer.encode("a<|end|>b", parse_special=True)


def test_merges_cannot_spell_a_special_token() -> None:
    """A special token that ordinary merges would build from a user's text is kept apart."""
    vocabulary = byte_level(("<|", 1), ("|>", 1), ("<||>", 3), merges=("< |", "| >", "<| |>"))
    tokenizer = Tokenizer.from_source(TextSource(None, vocabulary, None, None, (258,), None, False))
    ids = tokenizer.encode("<||>")
    assert 258 not in ids
    assert tokenizer.decode(ids) == "<||>"
    assert tokenizer.encode("<||>", parse_special=True) == [258]
    single = byte_level(("\u2603", 3))
    snowman = Tokenizer.from_source(TextSource(None, single, None, None, (256,), None, False))
    assert snowman.decode(snowman.encode("a\u2603")) == "a\u2603"


def test_added_tokens_outside_the_byte_alphabet() -> None:
    """Added tokens of a byte-level vocabulary stand for their own text, in any script."""
    vocabulary = byte_level(("<\uff5cend\u2581of\uff5c>", 3), ("\u00e9 \u00e9", 4), ("caf\u00e9", 1))
    tokenizer = Tokenizer.from_source(TextSource(None, vocabulary, None, None, (256,), None, False))
    assert tokenizer.encode("a<\uff5cend\u2581of\uff5c>", parse_special=True)[-1] == 256
    assert tokenizer.token_bytes(256) == "<\uff5cend\u2581of\uff5c>".encode()
    assert tokenizer.decode(tokenizer.encode("x\u00e9 \u00e9x")) == "x\u00e9 \u00e9x"
    assert tokenizer.token_bytes(257) == "\u00e9 \u00e9".encode()


def test_an_unknown_pre_tokenizer_is_refused() -> None:
    """An unknown pre-tokenizer is a load error that lists the known ones, never a guess."""
    with pytest.raises(ModelLoadError, match=r"'no-such'.*llama-bpe.*qwen2.*smollm"):
        Tokenizer.from_source(TextSource(None, byte_level(pre="no-such"), None, None, (), None, False))


WORDS = {
    "gpt-2": ["I", "'m", "Ġ123456", "ĠWE", "'", "LL", "ĠĠ", "Ġx", "Ċ", "Ċ"],
    "smollm": ["I", "'m", "Ġ", *"123456", "ĠWE", "'", "LL", "ĠĠ", "Ġx", "Ċ", "Ċ"],
    "llama-bpe": ["I", "'m", "Ġ", "123", "456", "ĠWE", "'LL", "ĠĠ", "Ġx", "ĊĊ"],
    "qwen2": ["I", "'m", "Ġ", *"123456", "ĠWE", "'LL", "ĠĠ", "Ġx", "ĊĊ"],
    "gpt-4o": ["I'm", "Ġ", "123", "456", "ĠWE'LL", "ĠĠ", "Ġx", "ĊĊ"],
    "tekken": ["I", "'m", "Ġ", *"123456", "ĠWE", "'LL", "ĠĠ", "Ġx", "ĊĊ"],
    "deepseek-v3": ["I", "'m", "Ġ", "123", "456", "ĠWE", "'LL", "ĠĠ", "Ġx", "ĊĊ"],
}


@pytest.mark.parametrize("name", list(WORDS))
def test_pre_tokenizers_cut_as_published(name: str) -> None:
    """Each pre-tokenizer cuts contractions, digits, spaces and lines as its model's published pattern does."""
    words = [word for word, _ in pre_tokenizer(name).build().pre_tokenize_str("I'm 123456 WE'LL   x\n\n")]
    if name == "gpt-2":
        assert words[-1] == "ĊĊ"
        words[-1:] = ["Ċ", "Ċ"]
    if name == "smollm":
        assert words[-1] == "ĊĊ"
        words[-1:] = ["Ċ", "Ċ"]
    assert words == WORDS[name]


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_loses_nothing(name: str) -> None:
    """Every known pre-tokenizer gives text back, in pieces as well as whole."""
    tokenizer = Tokenizer.from_source(TextSource(None, byte_level(pre=name), None, None, (), None, False))
    text = "I'm  12 345 naïve 漏斗图!?\r\n\t\u3000<a>🙂 \u00a0 end  "
    assert tokenizer.decode(tokenizer.encode(text)) == text
    long = "Some words and 1 more,  then\n" * 3_000
    ids = tokenizer.encode(long)
    assert ids == tokenizer._parts.plain.encode(long).ids


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model"),
        ({"tokens": [], "types": []}, "tokenizer.ggml.tokens"),
        ({"types": [1]}, "tokenizer.ggml.token_type"),
        ({"scores": [0.0]}, "tokenizer.ggml.scores"),
        ({"merges": ("a",)}, "tokenizer.ggml.merges"),
        ({"merges": ("a ",)}, "tokenizer.ggml.merges"),
        ({"merges": ("nowhere here",)}, "tokenizer.ggml.merges"),
    ],
)
def test_broken_vocabularies_name_their_field(change: dict[str, Any], field: str) -> None:
    """A vocabulary whose parts do not fit together is refused by the field's name."""
    source = TextSource(None, evolve(byte_level(), **change), None, None, (), None, False)
    with pytest.raises(ModelLoadError, match=field):
        Tokenizer.from_source(source)


def test_a_begin_token_must_exist() -> None:
    """A begin token outside the vocabulary is refused when loading."""
    with pytest.raises(ModelLoadError, match="bos_token_id=999"):
        Tokenizer.from_source(TextSource(None, byte_level(), None, 999, (), None, True))


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"7", b"null", b"\xff\xfe", b"{}", b'{"model": {}}', b"[" * 100_000, b'{"model":{"type":"X"}}'],
)
def test_malformed_tokenizer_json(content: bytes) -> None:
    """A tokenizer.json of the wrong form is one typed load error."""
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        Tokenizer.from_source(TextSource(content, None, None, None, (), None, False))


def word_piece() -> TextSource:
    """Return a tokenizer.json whose decoder is not made of bytes."""
    words = ["[UNK]", "hello", "##ing", "walk", "world", "!"]
    content = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {word: i for i, word in enumerate(words)},
        },
    }
    return TextSource(json.dumps(content).encode(), None, None, None, (), None, False)


def test_other_decoders_go_through_the_library() -> None:
    """A decoder that is not made of bytes streams the text that decoding at once gives."""
    tokenizer = Tokenizer.from_source(word_piece())
    ids = tokenizer.encode("hello walking world!")
    detokenizer = Detokenizer(tokenizer)
    parts = [detokenizer.push(one) for one in ids]
    assert "".join(parts) + detokenizer.finish() == tokenizer.decode(ids)
    assert parts[0] == "hello"
    assert tokenizer.token_bytes(1) == b"hello"


def test_a_source_without_a_tokenizer_is_refused() -> None:
    """A model with neither kind of tokenizer is refused."""
    with pytest.raises(ModelLoadError, match="no tokenizer"):
        Tokenizer.from_source(TextSource(None, None, None, None, (), None, False))


def test_spelling_bytes() -> None:
    """The byte alphabet is one letter per byte and back."""
    assert len(set(spell(bytes(range(256))))) == 256
