"""Fixed texts and prompts for the tests: English, Chinese and code, from 1 to 1,500 tokens."""

from __future__ import annotations

import random
from pathlib import Path

from kimicore.text.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data"


def text(name: str) -> str:
    """Return one of the texts under ``tests/data``."""
    return (DATA / name).read_text(encoding="utf-8")


def prompts(tokenizer: Tokenizer, count: int = 50, longest: int = 1500, seed: int = 7) -> list[list[int]]:
    """Return ``count`` prompts as token ids; lengths grow from 1 to ``longest``, the three texts take turns."""
    draw = random.Random(seed)
    ids = {name: tokenizer.encode(text(name)) for name in ("alice.txt", "analects.txt", "ledger.py.txt")}
    ids["mixed"] = ids["ledger.py.txt"][:900] + ids["alice.txt"][500:1200]
    found = []
    for index in range(count):
        length = round(longest ** (index / (count - 1)))
        fitting = [name for name, one in ids.items() if len(one) > length]
        source = ids[fitting[index % len(fitting)]]
        start = draw.randrange(len(source) - length)
        head = [source[0]] if tokenizer.bos_id is not None and tokenizer.bos_id == source[0] else []
        found.append((head + source[start : start + length])[: max(1, length)])
    return found
