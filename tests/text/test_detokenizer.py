"""Text that comes a token at a time."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kimicore.text.detokenizer import Detokenizer
from kimicore.text.tokenizer import Tokenizer

RELAXED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
FUNNEL = [177, 137, 233, 17815, 241, 46309]  # 漏斗图 in SmolLM2
MARKDOWN = (
    """# Title

| a | b | `code` |
|---|---|--------|
| 1 | ž | [link](https://example.org/p?q=1&r=%20#f) |

```python
def f(x):\n\treturn {"k": x ** 2}  # 漏斗图 🧭
```

* item **bold** _it_\n  1. sub -- \u201cquoted\u201d \u2026
<h1>html</h1>&nbsp;<br/>
"""
    * 9
)


def stream(tokenizer: Tokenizer, ids: list[int], **options: Any) -> list[str]:
    """Return what each id gives, and the tail."""
    detokenizer = Detokenizer(tokenizer, **options)
    return [*map(detokenizer.push, ids), detokenizer.finish()]


def test_characters_made_of_several_tokens(smollm2: Tokenizer, gemma: Tokenizer) -> None:
    """smg-project/smg#710: a character of several tokens comes once, whole, and never as U+FFFD."""
    bits = stream(gemma, [*gemma.encode("a ", add_bos=False), 472, 391, 412, *gemma.encode(" b", add_bos=False)])
    assert "".join(bits) == "a ꙮ b"
    assert not any("\ufffd" in bit for bit in bits)
    bits = stream(smollm2, FUNNEL)
    assert "".join(bits) == "漏斗图"
    assert bits.count("漏") == 1
    assert not any("\ufffd" in bit for bit in bits)


def test_nothing_is_dropped(smollm2: Tokenizer) -> None:
    """abetlen/llama-cpp-python#372: pieces that mean nothing alone are held, not dropped."""
    ids = [*FUNNEL, *smollm2.encode("잠깐만")]
    assert len(ids) == 15
    bits = stream(smollm2, ids)
    assert "".join(bits) == "漏斗图잠깐만" == smollm2.decode(ids)
    assert "" in bits
    assert not any("\ufffd" in bit for bit in bits)


def test_markup_and_links_stream(tokenizer: Tokenizer) -> None:
    """huggingface/tokenizers#1705: ordinary mixed text streams id by id without an error, byte for byte."""
    assert len(MARKDOWN) > 1_500
    ids = tokenizer.encode(MARKDOWN, add_bos=False)
    assert "".join(stream(tokenizer, ids)) == MARKDOWN


@pytest.mark.parametrize(("symbol", "ids"), [("🧭", [10813, 117, 251]), ("𝄞", [23159, 222, 248])])
def test_symbols_are_never_cut(smollm2: Tokenizer, symbol: str, ids: list[int]) -> None:
    """openvinotoolkit/openvino.genai#1356: symbols come whole; one cut at the end is one U+FFFD there."""
    bits = stream(smollm2, ids * 20)
    assert "".join(bits) == symbol * 20
    assert set(bits) == {"", symbol}
    *bits, tail = stream(smollm2, ids * 20 + ids[:1])
    assert "".join(bits) == symbol * 20
    assert tail == "\ufffd"
    assert smollm2.decode(ids * 20 + ids[:1]) == symbol * 20 + "\ufffd"


def test_special_tokens_inside_a_character(smollm2: Tokenizer) -> None:
    """A hidden token between the parts of a character does not break it; a shown one does."""
    ids = [177, 2, 137, 233]
    assert "".join(stream(smollm2, ids)) == smollm2.decode(ids) == "漏"
    shown = stream(smollm2, ids, skip_special=False)
    assert "".join(shown) == smollm2.decode(ids, skip_special=False)
    assert "<|im_end|>" in "".join(shown)


@RELAXED
@given(data=st.data(), skip_special=st.booleans())
def test_streamed_text_equals_decode(tokenizer: Tokenizer, data: st.DataObject, skip_special: bool) -> None:
    """Any ids at all stream to the text that decoding them at once gives, and no piece holds half a character."""
    low = st.integers(0, 600)
    wide = st.integers(0, tokenizer.vocab_size + 10)
    ids = data.draw(st.lists(st.one_of(low, wide), max_size=60))
    bits = stream(tokenizer, ids, skip_special=skip_special)
    assert "".join(bits) == tokenizer.decode(ids, skip_special=skip_special)
    "".join(bits).encode()


@RELAXED
@given(data=st.data())
def test_decode_equals_the_oracle_on_whole_characters(tokenizer: Tokenizer, oracle: Any, data: st.DataObject) -> None:
    """Where the ids make valid UTF-8, the text is the oracle's."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    text = tokenizer.decode(ids, skip_special=False)
    if "\ufffd" not in text:
        assert text == oracle.decode(ids, skip_special_tokens=False)
        assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


@RELAXED
@given(data=st.binary(max_size=40))
def test_any_bytes_stream_as_utf8(gemma: Tokenizer, data: bytes) -> None:
    """Byte pieces in any order read as UTF-8 does, with U+FFFD for what is none."""
    ids = [238 + byte for byte in data]
    assert "".join(stream(gemma, ids)) == data.decode("utf-8", "replace")
