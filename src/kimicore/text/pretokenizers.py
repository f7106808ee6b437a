"""How a byte-level vocabulary cuts text into words before merging, by the name that a GGUF file gives.

The patterns are those of the tokenizers that the models were trained with. A wrong one gives other ids
for the same text, so an unknown name is refused and never replaced by a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from attrs import frozen
from tokenizers import Regex, normalizers, pre_tokenizers

from kimicore.errors import ModelLoadError

__all__ = ["PRE_TOKENIZERS", "PreTokenizer", "pre_tokenizer"]

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_QWEN35 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}" + _CASED_TAIL
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}" + _CASED_TAIL
)
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@frozen
class PreTokenizer:
    """A way of cutting text into words.

    ``patterns``: matches are words of their own, applied in order; empty means GPT-2's pattern. ``digits``:
    each digit is cut out first. ``whole_words``: a word that is in the vocabulary is taken without merging.
    ``nfc``: text is brought into Unicode's composed form first.
    """

    patterns: tuple[str, ...] = ()
    digits: bool = False
    whole_words: bool = False
    nfc: bool = False

    def build(self) -> Any:
        """Return it as a pre-tokenizer of the `tokenizers` library."""
        steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if self.digits else []
        steps += [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.patterns))
        return pre_tokenizers.Sequence(steps)

    def normalizer(self) -> Any:
        """Return the normalizer that goes with it, or None."""
        return normalizers.NFC() if self.nfc else None


def _table() -> Mapping[str, PreTokenizer]:
    gpt2 = PreTokenizer()
    digits = PreTokenizer(digits=True)
    llama3 = PreTokenizer((_LLAMA3,), whole_words=True)
    llama3_merging = PreTokenizer((_LLAMA3,))
    qwen2 = PreTokenizer((_QWEN2,))
    gpt4o = PreTokenizer((_GPT4O,))
    table = {"": gpt2, "default": gpt2, "qwen35": PreTokenizer((_QWEN35,), nfc=True)}
    table |= dict.fromkeys(("gpt-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "phi-2"), gpt2)
    table |= dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), digits)
    table |= dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral"), llama3)
    table |= dict.fromkeys(("dbrx", "smaug-bpe"), llama3_merging)
    table |= {"qwen2": PreTokenizer((_QWEN2,), nfc=True), "tekken": PreTokenizer((_TEKKEN,), whole_words=True)}
    table |= dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "grok-2"), qwen2)
    table |= dict.fromkeys(("gpt-4o", "llama4"), gpt4o)
    table["deepseek-v3"] = PreTokenizer((r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3))
    table["deepseek-coder"] = PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}"))
    return MappingProxyType(table)


PRE_TOKENIZERS: Mapping[str, PreTokenizer] = _table()
"""Pre-tokenizers by the name in ``tokenizer.ggml.pre``; "" stands for a file that names none."""


def pre_tokenizer(name: str) -> PreTokenizer:
    """Return the pre-tokenizer called ``name``.

    Raises :class:`~kimicore.ModelLoadError` that lists the known names.
    """
    found = PRE_TOKENIZERS.get(name)
    if found is None:
        known = ", ".join(sorted(filter(None, PRE_TOKENIZERS)))
        raise ModelLoadError(
            f"tokenizer.ggml.pre={name!r}: this pre-tokenizer is not known (known are: {known}); "
            "load the model from a folder with its tokenizer.json"
        )
    return found
