"""Tokenizers of the demo models, what `transformers` makes of the same files, and texts of many kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kimicore.model.load import open_source
from kimicore.text.source import GGUFVocabulary, TextSource
from kimicore.text.tokenizer import Tokenizer

CORPUS = (
    "",
    "a",
    " ",
    "Good day",
    " Good day",
    "The quick brown fox can't jump; it's 10:45, isn't it? I'LL SEE. we've we'd",
    "  leading, trailing  and   runs    of     spaces  ",
    "\n\n\t\t mixed \r\n whitespace \u00a0\u3000\u2003 \x0b\x0c\u2028 end\n",
    "tabs\tand\nlines\n\n\nthree\n" + "\n" * 33 + "\t" * 40 + " " * 70 + "x",
    "漏斗图 在中国，今天天气很好。我们去公园吧！１２３",
    "日本語のテキストと한국어 잠깐만 العربية עברית हिन्दी ไทย Ελληνικά Русский",
    "žluťoučký kůň úpěl e\u0301 \u0301 naïve ﬁ ß İı ſ",
    "🧭🙂👩‍👩‍👧‍👦🏳️‍🌈 👍🏽 𝄞 ꙮ \ufdd0 \U0010fffd \ufeff \u200b\u200d",
    "control \x00\x01\x02\x07\x08\x1b[31m\x7f\x80\x9f end",
    "def f(x: int) -> str:\n    return f'{x!r:>10}'  # comment\n\n\nclass A:\n\tpass\n",
    'for (int i = 0; i < n; ++i) { a[i] += b[i] * 3.14e-10; } // ok\n<div class="x">&amp;</div>',
    "| a | b |\n|---|---|\n| `x` | [link](https://example.org/?q=1&r=%20) |\n\n* item\n  * sub\n",
    "<h1>Title</h1><table><tr><td>1</td></tr></table> <b>x</b>",
    "▁ literally ▁▁ and ▁word Ġword Ċ",
    "<0x41> <0x0A><0xGG> <unused5> [multimodal] <unk> <pad>",
    "x" * 300 + " " + "ab" * 200 + "!" * 90,
    "Zahlen: 1234567890 ½ ² ٣ Ⅷ 1,000.00 x1y2z3",
)
DIGIT_RUNS = ("a  1", "1\n\n2", "\n3", "x = [\n    1,\n    22,\n]", "½  ² \t٣")


@pytest.fixture(params=range(len(CORPUS)))
def text(request: pytest.FixtureRequest) -> str:
    """One text of the corpus."""
    return CORPUS[request.param]


@pytest.fixture(scope="session")
def smollm2_text(smollm2_path: Path) -> TextSource:
    """The text side of SmolLM2's file."""
    return open_source(str(smollm2_path)).text


@pytest.fixture(scope="session")
def gemma_text(gemma_path: Path) -> TextSource:
    """The text side of Gemma's file."""
    return open_source(str(gemma_path)).text


@pytest.fixture(scope="session")
def smollm2(smollm2_text: TextSource) -> Tokenizer:
    """SmolLM2's tokenizer."""
    return Tokenizer.from_source(smollm2_text)


@pytest.fixture(scope="session")
def gemma(gemma_text: TextSource) -> Tokenizer:
    """Gemma's tokenizer."""
    return Tokenizer.from_source(gemma_text)


@pytest.fixture(params=["smollm2", "gemma"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Either demo model's tokenizer."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def smollm2_oracle(smollm2_path: Path) -> Any:
    """SmolLM2's tokenizer by `transformers`, from the same file."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(smollm2_path.parent), gguf_file=smollm2_path.name)


@pytest.fixture(scope="session")
def gemma_oracle(gemma_path: Path) -> Any:
    """Gemma's tokenizer by `transformers`, from the same file."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(gemma_path.parent), gguf_file=gemma_path.name)


@pytest.fixture
def oracle(tokenizer: Tokenizer, request: pytest.FixtureRequest) -> Any:
    """`transformers`' twin of ``tokenizer``."""
    return request.getfixturevalue("smollm2_oracle" if tokenizer.vocab_size < 100_000 else "gemma_oracle")


def bytes_vocabulary(*more: tuple[str, int], prefix: bool = False, scores: bool = True) -> GGUFVocabulary:
    """Return a small SentencePiece vocabulary: <unk>, <s>, </s>, all byte pieces, ``more`` as (token, type)."""
    entries = [("<unk>", 2), ("<s>", 3), ("</s>", 3)]
    entries += [(f"<0x{byte:02X}>", 6) for byte in range(256)]
    entries += more
    tokens, types = [token for token, _ in entries], [kind for _, kind in entries]
    ranks = [float(-i) for i in range(len(tokens))] if scores else None
    return GGUFVocabulary("llama", "default", tokens, ranks, types, (), prefix)


@pytest.fixture
def small_source() -> Any:
    """Return a maker of a small SentencePiece model's text side."""

    def make(*more: tuple[str, int], prefix: bool = False, **fields: Any) -> TextSource:
        known = {"bos_id": 1, "eos_ids": (2,), "pad_id": None, "add_bos": False, "chat_template": None}
        vocabulary = fields.pop("gguf", None) or bytes_vocabulary(*more, prefix=prefix)
        return TextSource(tokenizer_json=None, gguf=vocabulary, **known | fields)

    return make


@pytest.fixture(params=DIGIT_RUNS)
def digit_run(request: pytest.FixtureRequest) -> str:
    """A digit after a run of whitespace."""
    return str(request.param)
