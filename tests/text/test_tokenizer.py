"""Tokenizing with the demo models' vocabularies, against `transformers` from the same files."""

from __future__ import annotations

import json
import os
import random
import sys
import threading
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kimicore import InvalidRequest, PromptTooLong
from kimicore.text.source import TextSource
from kimicore.text.tokenizer import CACHE_BYTES, PIECE_CHARS, Tokenizer

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
RELAXED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def spaces_before_digits(text: str) -> bool:
    """Whether a digit stands where the oracle, which does not cut digits out, reads SmolLM2's text otherwise."""
    return any(
        (char.isnumeric() and not char.isascii())
        or (char.isdigit() and at and text[at - 1].isspace() and (text[at - 1] != " " or text[:at][-2:-1].isspace()))
        for at, char in enumerate(text)
    )


def expected(oracle: Any, text: str, parse_special: bool) -> list[int]:
    """Return the oracle's ids without a begin token."""
    return list(oracle.encode(text, add_special_tokens=False, split_special_tokens=not parse_special))


def published(oracle: Any) -> Any:
    """Return SmolLM2's tokenizer with the digits cut out, as its published settings say ("smollm" in a GGUF)."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import pre_tokenizers

    backend = Backend.from_str(oracle.backend_tokenizer.to_str())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return backend


@pytest.mark.parametrize("parse_special", [False, True])
def test_ids_equal_the_oracles(tokenizer: Tokenizer, oracle: Any, text: str, parse_special: bool) -> None:
    """Every kind of text gives the ids that `transformers` gives, with special tokens parsed and not, and those of the
    published tokenizer where `transformers` reads SmolLM2's digits otherwise."""
    for one in (text, f"{text}<|endoftext|>x<bos>{text}", text * 3):
        ids = tokenizer.encode(one, parse_special=parse_special, add_bos=False)
        if tokenizer.vocab_size < 100_000 and spaces_before_digits(one):
            backend = published(oracle)
            backend.encode_special_tokens = not parse_special
            assert ids == backend.encode(one, add_special_tokens=False).ids
        else:
            assert ids == expected(oracle, one, parse_special)


def test_digits_are_cut_as_the_model_was_trained(smollm2: Tokenizer, smollm2_oracle: Any, digit_run: str) -> None:
    """SmolLM2's published settings cut every digit out first; that holds also after runs of whitespace."""
    assert smollm2.encode(digit_run) == published(smollm2_oracle).encode(digit_run).ids


def test_all_texts_equal_the_published_tokenizer(smollm2: Tokenizer, smollm2_oracle: Any, text: str) -> None:
    """SmolLM2's ids equal its published tokenizer's on every kind of text, digits in any place."""
    backend = published(smollm2_oracle)
    for one in (text, f"  7{text}\n8"):
        assert smollm2.encode(one, parse_special=True) == backend.encode(one).ids


@RELAXED
@given(one=TEXTS, parse_special=st.booleans())
def test_any_text_equals_the_oracle(tokenizer: Tokenizer, oracle: Any, one: str, parse_special: bool) -> None:
    """Arbitrary text gives the oracle's ids, and the oracle's text back."""
    ids = tokenizer.encode(one, parse_special=parse_special, add_bos=False)
    if not (tokenizer.vocab_size < 100_000 and spaces_before_digits(one)):
        assert ids == expected(oracle, one, parse_special)
    assert tokenizer.decode(ids, skip_special=False) == oracle.decode(ids, skip_special_tokens=False)


@RELAXED
@given(one=TEXTS)
def test_text_comes_back(tokenizer: Tokenizer, one: str) -> None:
    """decode(encode(x)) is x, except for the mark that Gemma reads as a space and bytes that SmolLM2 lacks."""
    lost = dict.fromkeys(map(ord, "\x04\x06\x13\x14\x16\x1d")) if tokenizer.vocab_size < 100_000 else {0x2581: " "}
    kept = "".join(char for char in one if not 0x40000 <= ord(char) <= 0xBFFFF).translate(lost)
    assert tokenizer.decode(tokenizer.encode(kept)) == kept


def test_special_tokens_in_text_stay_text(smollm2: Tokenizer) -> None:
    """huggingface/tokenizers#1347: special tokens in a prompt are ordinary text, and parsed only where asked for."""
    plain = smollm2.encode("a<|endoftext|>b")
    assert smollm2.special_ids.isdisjoint(plain)
    assert smollm2.decode(plain) == "a<|endoftext|>b"
    assert smollm2.encode("a<|endoftext|>b", parse_special=True) == [81, 0, 82]


@pytest.mark.parametrize(
    ("text", "ids"), [("<bos>word", [2, 3017]), ("word", [3017]), (" word", [3658]), ("  word", [138, 3017])]
)
def test_no_space_is_added(gemma: Tokenizer, text: str, ids: list[int]) -> None:
    """ggml-org/llama.cpp#8584: no space is added at the start or after a special token, and text comes back."""
    found = gemma.encode(text, parse_special=True, add_bos=False)
    assert found == ids
    assert gemma.decode(found, skip_special=False) == text


def test_words_beside_special_tokens(smollm2: Tokenizer, gemma: Tokenizer) -> None:
    """ggml-org/llama.cpp#7049: a word after an added token has the ids of the word alone."""
    assert smollm2.encode("<|im_start|>assistant", parse_special=True) == [1, 520, 9531]
    assert smollm2.encode("assistant") == [520, 9531]
    assert gemma.encode("<start_of_turn>user", parse_special=True, add_bos=False) == [105, 2364]


def test_first_word_with_and_without_a_space(smollm2: Tokenizer, gemma: Tokenizer) -> None:
    """ggml-org/llama.cpp#2310: a word with a space before it is another token, and both come back."""
    assert smollm2.encode("Good day") == [14229, 1194]
    assert smollm2.encode(" Good day") == [6422, 1194]
    assert gemma.encode("Good day", add_bos=False)[0] == 11947
    assert gemma.encode(" Good day", add_bos=False)[0] == 7886


def test_bos_comes_once(gemma: Tokenizer, smollm2: Tokenizer) -> None:
    """The begin token stands at the front exactly once where the model wants it, and not where it does not."""
    assert gemma.encode("") == [2]
    assert gemma.encode("word") == [2, 3017]
    assert gemma.encode("<bos>word", parse_special=True) == [2, 3017]
    assert gemma.encode("<bos>word").count(2) == 1
    assert smollm2.encode("") == []


@pytest.mark.parametrize("text", ["a\ud83d", "\udc00", "ok " * 50_000 + "\udfff"])
def test_half_characters_are_refused(tokenizer: Tokenizer, text: str) -> None:
    """guidance-ai/guidance#934: a lone surrogate is refused by its place, and the process lives on."""
    with pytest.raises(InvalidRequest, match="surrogate"):
        tokenizer.encode(text)
    assert tokenizer.encode("word")


@pytest.mark.parametrize("text", [b"\xe6\xad", bytearray(b"a"), 3, None, ["a"]])
def test_only_text_is_text(tokenizer: Tokenizer, text: Any) -> None:
    """guidance-ai/guidance#934: bytes and other types are refused with their name."""
    with pytest.raises(InvalidRequest, match=type(text).__name__):
        tokenizer.encode(text)


def test_a_gigantic_text_is_refused_unread(tokenizer: Tokenizer) -> None:
    """mozilla-ai/llamafile#835: 50 MB of text is refused with figures before any of it is tokenized."""
    with pytest.raises(PromptTooLong) as caught:
        tokenizer.encode("ab " * (50_000_000 // 3), max_tokens=8192)
    assert caught.value.limit_tokens == 8192
    assert caught.value.prompt_tokens > 8192


@pytest.mark.parametrize("unit", ["word ", "漏斗图", "x"])
def test_the_limit_is_exact(tokenizer: Tokenizer, unit: str) -> None:
    """A text of exactly as many tokens as fit is taken, one more is refused with its count."""
    ids = tokenizer.encode(unit * 700)
    assert tokenizer.encode(unit * 700, max_tokens=len(ids)) == ids
    with pytest.raises(PromptTooLong) as caught:
        tokenizer.encode(unit * 700, max_tokens=len(ids) - 1)
    assert (caught.value.prompt_tokens, caught.value.limit_tokens) == (len(ids), len(ids) - 1)


def test_long_texts_stop_early(tokenizer: Tokenizer) -> None:
    """A long text is counted in pieces and given up as soon as it has too many tokens."""
    with pytest.raises(PromptTooLong, match="at least") as caught:
        tokenizer.encode("some words " * 40_000, max_tokens=60_000)
    assert 60_000 < caught.value.prompt_tokens < 60_000 + PIECE_CHARS


def test_pieces_join_to_the_whole(tokenizer: Tokenizer, oracle: Any) -> None:
    """Encoding a long text in pieces gives the ids of encoding it at once."""
    draw = random.Random(7)
    words = ["the", "Zeit", "naïve", "x_1", "42", "日本", "don't", "\n", "  ", "<b>", "🙂", "end.", "A", "<|im_end|>"]
    text = " ".join(draw.choice(words) for _ in range(30_000))
    if tokenizer.vocab_size < 100_000:
        assert tokenizer.encode(text, add_bos=False) == published_plain(oracle, text)
    else:
        assert tokenizer.encode(text, add_bos=False) == expected(oracle, text, False)


def published_plain(oracle: Any, text: str) -> list[int]:
    """Return the published tokenizer's ids of a text whose special tokens are text."""
    backend = published(oracle)
    backend.encode_special_tokens = True
    return list(backend.encode(text, add_special_tokens=False).ids)


def test_repeated_texts_are_remembered_within_bounds(smollm2_text: TextSource) -> None:
    """Repeated texts are remembered within a bound of bytes, and each result is the caller's own."""
    tokenizer = Tokenizer.from_source(smollm2_text)
    first = tokenizer.encode("some text")
    first.append(-1)
    assert tokenizer.encode("some text") == first[:-1]
    for i in range(60):
        tokenizer.encode(f"{i} " + "words and words " * 6_000)
        assert tokenizer._cache_bytes <= CACHE_BYTES
    assert 0 < len(tokenizer._cache) < 60
    tokenizer.encode("x " * 600_000)
    assert all(len(text) < 600_000 for text, _ in tokenizer._cache)


def test_threads_share_a_tokenizer(tokenizer: Tokenizer) -> None:
    """Several threads get the ids that one alone gets."""
    texts = [f"text number {i} " * (i % 7 + 1) for i in range(60)]
    wanted = [tokenizer.encode(text) for text in texts]
    faults: list[str] = []

    def work(step: int) -> None:
        for i in range(0, 60 * step, step):
            if tokenizer.encode(texts[i % 60]) != wanted[i % 60]:
                faults.append(texts[i % 60])

    threads = [threading.Thread(target=work, args=(step,)) for step in (1, 7, 11, 13)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


def test_token_bytes_join_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    """deepjavalibrary/djl-serving#3085: tokens' bytes joined are the text's UTF-8, whatever characters they cut."""
    for one in ("漏斗图žluťoučký", text):
        ids = tokenizer.encode(one, add_bos=False)
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == tokenizer.decode(ids, skip_special=False)


def test_ids_outside_the_vocabulary_give_nothing(tokenizer: Tokenizer) -> None:
    """Padded rows of a vocabulary, and no ids at all, have no text."""
    outside = [tokenizer.vocab_size, tokenizer.vocab_size + 5, 1 << 40, -1]
    assert [tokenizer.token_bytes(one) for one in outside] == [b""] * 4
    assert tokenizer.decode([3017, *outside]) == tokenizer.decode([3017])


def test_special_tokens_are_hidden_or_shown(smollm2: Tokenizer) -> None:
    """decode leaves special tokens out unless told otherwise."""
    ids = [1, 520, 9531, 2]
    assert smollm2.decode(ids) == "assistant"
    assert smollm2.decode(ids, skip_special=False) == "<|im_start|>assistant<|im_end|>"


def test_version_tells_vocabularies_apart(smollm2: Tokenizer, gemma: Tokenizer, smollm2_text: TextSource) -> None:
    """The version is a stable digest of what decides on a text's ids."""
    assert smollm2.version == Tokenizer.from_source(smollm2_text).version
    assert smollm2.version != gemma.version
    assert len(smollm2.version) == 16


def test_other_threads_run_while_a_long_text_is_encoded(tokenizer: Tokenizer) -> None:
    """Encoding gives the interpreter lock away: another thread takes many turns during one call."""
    text = "".join(random.Random(3).choices("abcdefghij", k=400_000))
    running, turns = threading.Event(), 0
    running.set()

    def count() -> None:
        nonlocal turns
        while running.is_set():
            turns += 1
            os.sched_yield()  # gives the lock away

    thread = threading.Thread(target=count)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(10.0)  # so that only a call that gives the lock away lets the other one run
    try:
        thread.start()
        before = turns
        backend = tokenizer._parts.plain
        backend.encode_batch_fast([text], add_special_tokens=False)
        after = turns
    finally:
        running.clear()
        sys.setswitchinterval(interval)
        thread.join()
    assert after > before


def test_json_twin_equals_the_gguf(tokenizer: Tokenizer, oracle: Any, text: str) -> None:
    """The same tokenizer from a tokenizer.json gives the same ids, bytes and text."""
    twin = json_twin(tokenizer, oracle)
    for parse_special in (False, True):
        one = f"{text}<|im_end|><bos>{text}"
        ids = twin.encode(one, parse_special=parse_special)
        assert ids[len(ids) and ids[0] == 2 and tokenizer.add_bos :] == expected(oracle, one, parse_special)
        assert twin.decode(ids, skip_special=False) == tokenizer.decode(ids, skip_special=False)
        assert [twin.token_bytes(i) for i in ids] == [tokenizer.token_bytes(i) for i in ids]


TWINS: dict[int, Tokenizer] = {}


def json_twin(tokenizer: Tokenizer, oracle: Any) -> Tokenizer:
    """Return the oracle's own tokenizer.json, read by us; with truncation and padding that must not matter."""
    if tokenizer.vocab_size not in TWINS:
        content = json.loads(oracle.backend_tokenizer.to_str())
        content["truncation"] = {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
        content["padding"] = {
            "strategy": {"Fixed": 9},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "x",
        }
        source = TextSource(
            tokenizer_json=json.dumps(content).encode(),
            gguf=None,
            chat_template=None,
            bos_id=tokenizer.bos_id,
            eos_ids=tokenizer.eos_ids,
            pad_id=tokenizer.pad_id,
            add_bos=tokenizer.add_bos,
        )
        TWINS[tokenizer.vocab_size] = Tokenizer.from_source(source)
    return TWINS[tokenizer.vocab_size]
