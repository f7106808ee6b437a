"""Sparse decoding beside full attention: what it finds and loses, and how much faster it is: one JSON line per row.

    python benchmarks/sparse_decode.py [--model smollm2-135m-instruct] [--cases needle,perplexity,speed]

The runner is driven directly, so that any token can be asked as generated tokens are: as a query of its own that reads
``--shares`` of the blocks in layers with full attention. Contexts before it are computed with full attention, as
prompts always are. ``--choices`` are ways to choose blocks: "own" is the engine's own; "latest" takes the
first block and the last ones, as many in all; "exact" takes those that get the most attention, which needs every key
and shows what an estimate could reach; "range-1" goes by the whole range of a block's keys, as Quest does, and
"range-0.5" by half of it.

``needle``: in a text of ``--lengths`` tokens one sentence tells the secret number of somebody, at a depth of 0.1 to
0.9, and the text ends with a question for it. Variant "answer": the question is part of the prompt, and what is
generated is sparse (the first token is not, it comes of the prompt's last query; that is the space before the digits).
Variant "question": the question's tokens are sparse queries as well. A row has the share of numbers found.
``perplexity``: ``--targets`` tokens after contexts of ``--lengths`` tokens, each a sparse query, the same targets for
every length: perplexity, its change against full attention and the standard error of the paired difference. The rows
"full" of both cases read all blocks; "check" has the largest difference of a log-probability, over the first targets,
between share 1 through the choice of blocks and a step that is not sparse. ``speed``: milliseconds per step with
``--speed-tokens`` tokens of context in every row, medians of ``--steps`` steps; shares take turns. Run it alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import re
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from attrs import frozen
from sparse_decode_rows import Bench, Row
from torch import Tensor

from engine import machine
from kimicore.assembly import choose_dtype

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
NAMES = ("Marion", "Victor", "Helena", "Oscar", "Teresa", "Julian", "Bertha", "Felix", "Gloria", "Hugo")
ANSWER_TOKENS = 8
CHECKED = 4


def say(**row: Any) -> None:
    """Print a row."""
    print(json.dumps(row), flush=True)


# ---------------------------------------------------------------- needle


@frozen
class Needle:
    """A row whose text tells a number at a depth, and what to ask for it."""

    row: Row
    depth: float
    name: str
    secret: str


def planted(bench: Bench, length: int, number: int) -> list[Needle]:
    """Return a text of ``length`` tokens with one sentence in it that tells a number, once for each depth.

    What comes before the sentence is computed once for all depths.
    """
    chance = random.Random(1_000 * length + number)
    encode = bench.tokenizer.encode
    start = (4_111 * number) % (len(bench.text) - length)
    filler = [*bench.begin, *bench.text[start : start + length]]
    stop = encode(".", add_bos=False)[0]
    base, found = Row(filler, bench.take(length)), []
    for depth, name in zip(DEPTHS, chance.sample(NAMES, len(DEPTHS)), strict=True):
        secret = str(chance.randrange(10_000, 100_000))
        fact = encode(f" The secret number of {name} is {secret}.", add_bos=False)
        place = int(depth * (length - len(fact)))
        place = next((at + 1 for at in range(place, min(place + 64, len(filler))) if filler[at] == stop), place)
        bench.prefill(base, place)
        ids = [*filler[:place], *fact, *filler[place:]][:length]
        row = bench.branch(base, ids, length - place)
        bench.prefill(row, length)
        found.append(Needle(row, depth, name, secret))
    return found


def ask(bench: Bench, rows: Sequence[Row]) -> list[str]:
    """Answer every row greedily, a token a step, and return the texts."""
    while left := [row for row in rows if len(row.made) < ANSWER_TOKENS]:
        done = [at for at, row in enumerate(left) if row.computed + 1 == len(row.known)]
        best = iter(bench.logits(left, done).argmax(dim=-1).tolist())
        for at, row in enumerate(left):
            row.computed += 1
            if at in done:
                row.made.append(next(best))
                row.known.append(row.made[-1])
    return [bench.tokenizer.decode(row.made) for row in rows]


def questions(bench: Bench, variant: str, needles: Sequence[Needle]) -> list[tuple[Row, Needle]]:
    """Return a row for every needle and share that asks for the number."""
    asked = []
    for one in needles:
        question = bench.tokenizer.encode(f"\n\nThe secret number of {one.name} is", add_bos=False)
        base = bench.branch(one.row, one.row.known + question, len(question))
        if variant == "answer":  # the question as a prompt has it; its last token gives the first answer
            bench.prefill(base, len(base.known) - 1)
        for share in (1.0, *bench.options.shares):
            row = bench.branch(base, base.known, len(question) + ANSWER_TOKENS, share)
            row.prompt_tokens = len(row.known) if variant == "answer" else row.computed
            asked.append((row, one))
    return asked


def needle(options: argparse.Namespace, bench: Bench) -> None:
    """Case ``needle``."""
    for length in options.lengths:
        bench.reset()
        needles = [one for number in range(options.needles) for one in planted(bench, length, number)]
        for variant, choice in itertools.product(options.variants, options.choices):
            mark = bench.mark()
            asked = questions(bench, variant, needles)
            bench.choose(choice)
            made = ask(bench, [row for row, _ in asked])
            bench.choose("own")
            bench.restore(mark)
            for share in (1.0, *options.shares):
                if share == 1.0 and choice != options.choices[0]:
                    continue
                hits: dict[float, list[bool]] = {depth: [] for depth in DEPTHS}
                for (row, one), text in zip(asked, made, strict=True):
                    if row.share == share:
                        hits[one.depth].append(one.secret in text)
                say(
                    case="needle",
                    model=options.model,
                    length=length,
                    variant=variant,
                    choice="full" if share == 1.0 else choice,
                    share=share,
                    found=round(statistics.fmean(one for depth in hits.values() for one in depth), 3),
                    of=sum(map(len, hits.values())),
                    by_depth={str(depth): round(statistics.fmean(one), 2) for depth, one in hits.items()},
                )


# ---------------------------------------------------------------- perplexity


def target_scores(bench: Bench, rows: Sequence[Row], context: int, targets: int) -> Tensor:
    """Return the log-probabilities [targets, rows] of the tokens behind the context, every query on its own."""
    found = []
    for target in range(targets):
        logits = bench.logits(rows)
        following = torch.tensor([row.known[context + target] for row in rows])
        found.append(logits.log_softmax(dim=-1).gather(1, following[:, None])[:, 0])
        for row in rows:
            row.computed += 1
    return torch.stack(found).double()


def perplexity(options: argparse.Namespace, bench: Bench) -> None:
    """Case ``perplexity``."""
    most, ways = max(options.lengths), (1.0, *options.shares)
    apart = (len(bench.text) - options.targets - most) // max(1, options.texts - 1)
    for length in options.lengths:
        bench.reset()
        bench.choose("own")
        texts = []
        for number in range(options.texts):
            ids = bench.window(most + apart * number, length, options.targets)
            texts.append(Row(ids, bench.take(length)))
            bench.prefill(texts[-1], length - 1)
        check_full(bench, texts, length)
        full = None
        for choice in options.choices:
            mark = bench.mark()
            bench.choose(choice)
            wanted = ways if full is None else options.shares
            rows = [bench.branch(text, text.known, options.targets + 1, share) for share in wanted for text in texts]
            found = target_scores(bench, rows, length, options.targets).view(options.targets, len(wanted), len(texts))
            bench.restore(mark)
            full = found[:, 0] if full is None else full
            for at, share in enumerate(wanted):
                say(
                    case="perplexity",
                    model=options.model,
                    length=length,
                    choice="full" if share == 1.0 else choice,
                    share=share,
                    **beside(found[:, at], full),
                )
    bench.choose("own")


def beside(found: Tensor, full: Tensor) -> dict[str, Any]:
    """Return what log-probabilities say, and say beside those of full attention."""
    worse = full - found
    return {
        "targets": found.numel(),
        "perplexity": round(math.exp(-float(found.mean())), 4),
        "change_percent": round(100 * math.expm1(float(worse.mean())), 3),
        "standard_error_percent": round(100 * float(worse.std()) / math.sqrt(worse.numel()), 3),
    }


def check_full(bench: Bench, texts: Sequence[Row], length: int) -> None:
    """Print the row "check"."""
    mark, found = bench.mark(), []
    for share in (None, 1.0):
        rows = [bench.branch(text, text.known, CHECKED + 1, share) for text in texts]
        found.append(target_scores(bench, rows, length, CHECKED))
    bench.restore(mark)
    largest = float((found[0] - found[1]).abs().max())
    say(case="perplexity", model=bench.options.model, length=length, check="share 1", largest_difference=largest)


# ---------------------------------------------------------------- speed


def copied(bench: Bench, row: Row, tokens: int) -> Row:
    """Return a row with the same tokens in blocks of its own, so that rows read different memory."""
    tables = bench.take(len(row.known))
    for kind, (view, summary) in enumerate(zip(bench.arena.views, bench.arena.summaries, strict=True)):
        for source, target in zip(row.tables[kind], tables[kind], strict=True):
            view[target].copy_(view[source])
            if summary is not None:
                summary[target].copy_(summary[source])
    return Row(list(row.known), tables, tokens, tokens)


def speed(options: argparse.Namespace, bench: Bench) -> None:
    """Case ``speed``."""
    for tokens in options.speed_tokens:
        bench.reset()
        ids = bench.window(tokens, tokens, 2)
        first = Row(ids, bench.take(len(ids)))
        bench.prefill(first, tokens)
        every = [copied(bench, first, tokens) for _ in range(max(options.rows))]
        for count in options.rows:
            rows = every[:count]
            times: dict[float | None, list[float]] = {None: [], **{share: [] for share in options.shares}}
            for turn in range(options.steps + 2):
                for share, taken in times.items():
                    for row in rows:
                        row.share = share
                    result = bench.runner.run(bench.step(rows))
                    if turn > 1:
                        taken.append(result.step_s)
            middle = {share: statistics.median(taken) for share, taken in times.items()}
            for share, taken_s in middle.items():
                say(
                    case="speed",
                    model=options.model,
                    tokens=tokens,
                    rows=count,
                    share=share or 1,
                    step_ms=round(1000 * taken_s, 3),
                    fastest_ms=round(1000 * min(times[share]), 3),
                    speedup=round(middle[None] / taken_s, 2),
                )


CASES = {"needle": needle, "perplexity": perplexity, "speed": speed}


def numbers(text: str) -> list[int]:
    """Return the numbers of "1000,2000"."""
    return [int(one) for one in text.split(",")]


def shares(text: str) -> list[float]:
    """Return the numbers of "0.5,0.25"."""
    return [float(one) for one in text.split(",")]


def words(text: str) -> list[str]:
    """Return the words of "answer,question"."""
    return text.split(",")


def choices(text: str) -> list[str]:
    """Return the ways to choose blocks of "own,range-0.5"."""
    found = words(text)
    for one in found:
        if not re.fullmatch(r"own|latest|exact|range-\d+(\.\d+)?", one):
            raise argparse.ArgumentTypeError(f"{one!r} is none of own, latest, exact, range-X")
    return found


def main() -> None:
    """Run the cases that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--shares", type=shares, default=[0.5, 0.25, 0.125], help="of the blocks")
    parser.add_argument("--choices", type=choices, default=["own", "latest"], help="such as own,range-0.5")
    parser.add_argument("--variants", type=words, default=["answer", "question"], help="of needle")
    parser.add_argument("--needles", type=int, default=4, help="of needle, at each depth")
    parser.add_argument("--lengths", type=numbers, default=[1_000, 2_000, 4_000, 7_000], help="of needle, perplexity")
    parser.add_argument("--texts", type=int, default=6, help="of perplexity")
    parser.add_argument("--targets", type=int, default=512, help="of perplexity, in each text")
    parser.add_argument("--speed-tokens", type=numbers, default=[7_000], help="of speed")
    parser.add_argument("--rows", type=numbers, default=[1, 8], help="of speed")
    parser.add_argument("--steps", type=int, default=32, help="of speed")
    parser.add_argument("--arena", default="3GiB")
    options = parser.parse_args()
    unknown = set(options.cases.split(",")) - set(CASES)
    if unknown:
        parser.error(f"unknown cases: {', '.join(sorted(unknown))}")
    torch.set_num_threads(options.threads)
    say(case="machine", **machine(), dtype=str(choose_dtype(options.dtype)).removeprefix("torch."))
    bench = Bench(options)
    for name in options.cases.split(","):
        CASES[name](options, bench)


if __name__ == "__main__":
    main()
