"""The prompts and texts that models are compared on: five categories that ship with the package, or a caller's own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import zip_longest
from pathlib import Path
from typing import Final

from attrs import frozen

from kimicore.errors import ConfigError

__all__ = ["CATEGORIES", "Corpus", "Prompt", "built_in", "from_files"]

CATEGORIES: Final = ("news", "code", "mathematics", "chinese", "classical-chinese")
"""The kinds of text that ship with the package."""

_FOLDER: Final = Path(__file__).parent / "texts"
_PASSAGE: Final = re.compile(r"^%%\n", re.MULTILINE)
_SENTENCE: Final = re.compile(r"(?<=[.!?])\s+|(?<=[。！？；])\s*|\n+")
_LINE: Final = re.compile(r"\n+")
_CHOICE: Final = re.compile(r"\{(?:(\d+)-(\d+)|([^{}]*\|[^{}]*))\}")
_FILLS: Final = 8
"""How often a template is filled."""
_LENGTHS: Final = (120, 260, 60, 400)
"""Lengths of prompts in letters, in turn; a Chinese character counts as four."""
_LEAST: Final = 24


@frozen
class Prompt:
    """A text to be continued, and its category."""

    category: str
    text: str


@frozen
class Corpus:
    """Prompts, category by category in turn, and the text of each category that perplexity is measured on."""

    prompts: tuple[Prompt, ...]
    texts: dict[str, str]

    @property
    def digest(self) -> str:
        """Hex digest of prompts and texts."""
        found = blake2b(digest_size=16)
        for part in [*(f"{one.category}\0{one.text}" for one in self.prompts), *self.texts.values()]:
            found.update(part.encode("utf-8", "surrogatepass") + b"\1")
        return found.hexdigest()


def built_in(count: int) -> Corpus:
    """Return ``count`` distinct prompts, evenly from each category, always the same ones.

    A smaller count gives the first prompts of a larger one. Raises :class:`~kimicore.ConfigError` where there are not
    so many.
    """
    texts = {one: (_FOLDER / f"{one}.txt").read_text(encoding="utf-8") for one in CATEGORIES}
    found = {}
    for category, text in texts.items():
        cuts = _LINE if category == "code" else _SENTENCE
        file = _FOLDER / f"{category}.templates.txt"
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else ()
        found[category] = list(_distinct(_PASSAGE.split(text), cuts, lines))
    most = len(CATEGORIES) * min(len(own) for own in found.values())
    if not 1 <= count <= most:
        raise ConfigError(f"prompts={count}: must be from 1 to {most}; own texts can give more")
    return Corpus(_in_turn(found, count), {one: _PASSAGE.sub("\n", text) for one, text in texts.items()})


def from_files(paths: Sequence[str], count: int) -> Corpus:
    """Return ``count`` distinct prompts, evenly from the texts of files; a file's name is its category.

    Passages are parted by empty lines, and every sentence or line of one may begin a prompt. Raises
    :class:`~kimicore.ConfigError`, naming the file, for one that cannot be read or has too few sentences.
    """
    found: dict[str, list[str]] = {}
    texts: dict[str, str] = {}
    for path in paths:
        name = Path(path).stem
        if name in found:
            raise ConfigError(f"text={path!r}: a second file of the name {name!r}; names are the categories")
        try:
            texts[name] = Path(path).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"text={path!r}: cannot be read: {error}") from error
        found[name] = list(_distinct(re.split(r"\n[ \t]*\n", texts[name]), _SENTENCE, ()))
    if count < 1:
        raise ConfigError(f"prompts={count}: must be at least 1")
    for path, own in zip(paths, found.values(), strict=True):
        needed = -(-count // len(found))
        if len(own) < needed:
            raise ConfigError(f"text={path!r}: gives {len(own)} distinct prompts and {needed} are needed of it")
    return Corpus(_in_turn(found, count), texts)


def _in_turn(found: dict[str, list[str]], count: int) -> tuple[Prompt, ...]:
    rounds = zip_longest(*([Prompt(category, text) for text in own] for category, own in found.items()))
    return tuple([one for group in rounds for one in group if one is not None][:count])


def _distinct(passages: Sequence[str], cuts: re.Pattern[str], templates: Sequence[str]) -> Iterator[str]:
    """Yield prompts in an order that has nothing to do with the text's: first one from each place, then others."""
    seen: set[str] = set()
    for turn in range(len(_LENGTHS)):
        own = [text for at, passage in enumerate(passages) for text in _beginnings(passage.strip(), cuts, turn + at)]
        if not turn:
            own += [_filled(line, number) for line in templates if line.strip() for number in range(_FILLS)]
        yield from sorted(set(own) - seen, key=_shuffled)
        seen.update(own)


def _shuffled(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def _weight(text: str) -> int:
    """Return the length in letters, a Chinese character counting as four."""
    return sum(4 if "\u2e80" <= one <= "\uffef" else 1 for one in text)


def _beginnings(passage: str, cuts: re.Pattern[str], turn: int) -> Iterator[str]:
    """Yield a text from the start of each sentence of a passage, up to a length and the end of a word."""
    starts = [0, *(found.end() for found in cuts.finditer(passage))]
    for at, start in enumerate(starts):
        room, end = _LENGTHS[(turn + at) % len(_LENGTHS)], start
        while end < len(passage) and room > 0:
            room -= _weight(passage[end])
            end += 1
        while 0 < end < len(passage) and passage[end - 1].isascii() and passage[end].isascii():
            if not (passage[end - 1].isalnum() and passage[end].isalnum()):
                break
            end += 1
        text = passage[start:end].rstrip()
        if _weight(text) >= _LEAST:
            yield text


def _filled(line: str, number: int) -> str:
    """Return a template with each ``{low-high}`` as a number and each ``{one|other}`` as one of its texts."""
    place = iter(range(1 << 16))

    def fill(found: re.Match[str]) -> str:
        drawn = int.from_bytes(_shuffled(f"{line}\0{number}\0{next(place)}"))
        if found[3] is not None:
            options = found[3].split("|")
            return options[drawn % len(options)]
        low, high = int(found[1]), int(found[2])
        return str(low + drawn % (high - low + 1))

    return _CHOICE.sub(fill, line).replace("\\n", "\n")
