"""The calibration set as sequences of token ids: five kinds of text, taken in turns."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib.resources import files
from typing import Final

import torch
from torch import Tensor

from kimicore.errors import ConfigError
from kimicore.text.tokenizer import Tokenizer

__all__ = ["KINDS", "calibration_texts", "calibration_tokens", "texts_digest"]

KINDS: Final = ("news", "code", "mathematics", "modern_chinese", "classical_chinese")


def calibration_texts() -> dict[str, str]:
    """Return the shipped texts by kind; their sources stand beside them."""
    folder = files("kimicore.quantize") / "texts"
    return {kind: (folder / f"{kind}.txt").read_text(encoding="utf-8") for kind in KINDS}


def texts_digest(texts: Mapping[str, str]) -> str:
    """Return a hex digest that changes with any of the texts."""
    digest = hashlib.blake2b(digest_size=16, person=b"kimicore-calibr")
    for kind, text in texts.items():
        digest.update(f"{kind}\0{len(text)}\0{text}".encode())
    return digest.hexdigest()


def calibration_tokens(tokenizer: Tokenizer, texts: Mapping[str, str], samples: int, tokens: int) -> Tensor:
    """Return token ids [samples, tokens] int64; the kinds take turns, each going on where it stopped.

    A kind that is used up begins again, each time a little further on, so that no two sequences are the same. Where
    the model's texts begin with a token of their own, so does each sequence.

    Raises :class:`~kimicore.ConfigError` where a text has not the tokens of one sequence.
    """
    begin = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    taken = tokens - len(begin)
    ids = {kind: tokenizer.encode(text, add_bos=False) for kind, text in texts.items()}
    for kind, own in ids.items():
        if len(own) < taken:
            raise ConfigError(f"sample_tokens={tokens}: the text {kind!r} has {len(own)} tokens; use fewer")
    found = []
    names = list(ids)
    for number in range(samples):
        own, turn = ids[names[number % len(names)]], number // len(names)
        whole = len(own) // taken
        round_, place = divmod(turn, whole)
        start = place * taken + (round_ * taken // 3) % taken
        start = min(start, len(own) - taken) if round_ else start
        found.append(begin + own[start : start + taken])
    return torch.tensor(found)
