"""What models are compared on: enough of it, of five kinds, always the same, and none of it calibrated on."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

import kimicore.verify.prompts as module
from kimicore.errors import ConfigError
from kimicore.verify import CATEGORIES, built_in, from_files

ROOT = Path(__file__).parents[2]
TEXTS = Path(module.__file__).parent / "texts"


def test_there_are_a_thousand_distinct_prompts_of_five_kinds() -> None:
    """A thousand prompts are all different, and each of the five categories has two hundred of them."""
    prompts = built_in(1000).prompts
    assert len({one.text for one in prompts}) == 1000
    assert Counter(one.category for one in prompts) == dict.fromkeys(CATEGORIES, 200)
    assert len(CATEGORIES) == 5


@pytest.mark.parametrize("count", [1, 4, 5, 7, 200, 1003])
def test_prompts_are_as_many_as_asked_for_and_even(count: int) -> None:
    """Any number of prompts is met exactly, and no category has two more than another."""
    corpus = built_in(count)
    counts = Counter(one.category for one in corpus.prompts)
    assert len(corpus.prompts) == count
    assert max(counts.values()) - min(counts[one] for one in CATEGORIES) <= 1


def test_fewer_prompts_are_the_first_of_more() -> None:
    """A small run looks at the first prompts of a large one, so that the two can be set side by side."""
    assert built_in(1000).prompts[:60] == built_in(60).prompts
    assert built_in(60).digest == built_in(60).digest != built_in(61).digest


def test_templates_are_filled() -> None:
    """No prompt shows a template's brackets, and filled ones differ in their numbers."""
    written = [one.text for one in built_in(1000).prompts if one.category in ("news", "mathematics")]
    assert [text for text in written if re.search(r"\{[^{}]*[|-][^{}]*\}|\\n", text)] == []
    assert len({text for text in written if text.startswith("A train travels")}) > 3


def test_the_texts_stay_small_and_are_nobody_else_s() -> None:
    """The texts take at most 200 KB, and no sentence of them is in the tests' texts or in those for calibration."""
    assert sum(one.stat().st_size for one in TEXTS.iterdir()) <= 200_000
    others = [*(ROOT / "tests" / "data").iterdir(), *(ROOT / "src" / "kimicore" / "quantize" / "texts").glob("*")]
    elsewhere = "".join(
        re.sub(r"\s+", "", one.read_text(encoding="utf-8")) for one in others if one.name != "README.md"
    )
    assert len(elsewhere) > 50_000
    shared = []
    for category in CATEGORIES:
        for sentence in re.split(r"[.!?。！？；\n]", (TEXTS / f"{category}.txt").read_text(encoding="utf-8")):
            squeezed = re.sub(r"\s+", "", sentence)
            if len(squeezed) >= (9 if "chinese" in category else 40) and squeezed in elsewhere:
                shared.append(squeezed)
    assert shared == []


def test_the_sources_are_named() -> None:
    """The page beside the texts has a row for every file."""
    told = (TEXTS / "README.md").read_text(encoding="utf-8")
    assert [one.name for one in TEXTS.iterdir() if one.suffix == ".txt" and f"`{one.name}`" not in told] == []


@pytest.mark.parametrize("count", [0, -3, 100_000])
def test_impossible_numbers_are_refused(count: int) -> None:
    """A number of prompts that there are not is refused with the largest that there are."""
    with pytest.raises(ConfigError, match=rf"prompts={count}: must be from 1 to \d+"):
        built_in(count)


def test_own_texts_give_prompts(tmp_path: Path) -> None:
    """Files of one's own are categories under their names, and passages are parted by empty lines."""
    first, second = tmp_path / "letters.txt", tmp_path / "recipes.md"
    first.write_text("\n\n".join(f"Dear reader number {n}, this is a letter. It is rather short." for n in range(9)))
    second.write_text("\n\n".join(f"Take {n} spoons of flour and stir them well. Then wait a while." for n in range(9)))
    corpus = from_files([str(first), str(second)], 10)
    assert Counter(one.category for one in corpus.prompts) == {"letters": 5, "recipes": 5}
    assert all(one.text in corpus.texts[one.category] for one in corpus.prompts)


def test_own_texts_that_cannot_serve_are_refused(tmp_path: Path) -> None:
    """A file that is not there, is no text, is too short or has another's name is refused by its name."""
    short, binary = tmp_path / "short.txt", tmp_path / "binary.txt"
    short.write_text("One single sentence stands in this file.")
    binary.write_bytes(b"\xff\xfe\x00")
    other = tmp_path / "else"
    other.mkdir()
    (other / "short.txt").write_text("A second file.")
    for paths, count, told in (
        ([tmp_path / "absent.txt"], 1, "absent.txt.*cannot be read"),
        ([binary], 1, "binary.txt.*cannot be read"),
        ([short], 3, "short.txt.*gives 1 distinct prompts and 3 are needed"),
        ([short, other / "short.txt"], 2, "a second file of the name 'short'"),
        ([short], 0, "prompts=0"),
    ):
        with pytest.raises(ConfigError, match=told):
            from_files([str(one) for one in paths], count)
