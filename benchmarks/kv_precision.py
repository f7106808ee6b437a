"""KV of 8 and of 4 bits beside the model's own precision, by what it costs in quality and saves: one JSON line per row.

    python benchmarks/kv_precision.py [--model smollm2-135m-instruct] [--cases perplexity,similarity,memory,speed]

All through one engine that holds the three precisions. ``perplexity``: windows of a book, scored with
``prompt_logprobs``: the perplexity, its change against full precision with the standard error of the paired
difference, ``accuracy`` (share of positions whose most likely token is the text's own next one) with its change in
points, and ``agreement`` (share of positions whose most likely token is the one of full precision). A position reads
its own block in full precision and all earlier ones packed, as in every request. The last row of the first windows is
full precision again, with the prompt cut into other chunks: what differs there is the rounding of the model's own type.
``similarity``: greedy continuations beside those of full precision: edit similarity (1 - distance / the longer one's
length) of texts and of token ids, the median of the first token that differs, and how many are the same; the row "full"
is full precision again with the requests one by one rather than all at once, which tells what rounding in another batch
does.
``memory``: bytes per token, and the longest request that the arena holds. ``speed``: seconds per token of 64 after a
cached context (median of ``--repeat``), and tokens per second of the prompts; precisions take turns. Run it alone.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from typing import Any

import anyio
import torch

import kimicore
from engine import TEXT, machine
from kimicore.assembly import choose_dtype
from kimicore.kv.arena import slab_bytes
from kimicore.model.kv_layout import kv_classes
from kimicore.model.load import open_source
from kimicore.model.spec import spec_from_config
from kimicore.types import KV_PRECISIONS, KVPrecision
from kimicore.verify.tally import similarity

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
NEW_TOKENS = 64
Scores = tuple[list[float], list[bool], list[int]]


class Bench:
    """One engine that holds every precision, and token ids of a text."""

    def __init__(self, options: argparse.Namespace, **settings: Any) -> None:
        self.options = options
        self.engine = kimicore.Engine(options.model, kimicore.EngineConfig(dtype=options.dtype, threads=options.threads,
            kv_precisions=KV_PRECISIONS, **settings))  # fmt: skip

    async def __aenter__(self) -> Bench:
        await self.engine.open()
        self.loop = self.engine.face.loop
        tokenizer = self.loop.tokenizer
        self.text = tokenizer.encode(TEXT.read_text(), add_bos=False)
        bos = tokenizer.bos_id
        self.begin = [bos] if tokenizer.add_bos and bos is not None else []
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.engine.aclose()

    def window(self, start: int, tokens: int) -> list[int]:
        """Return ``tokens`` ids from a place of the text, the model's begin token before them where it wants one."""
        twice = self.text + self.text
        return [*self.begin, *twice[start : start + tokens - len(self.begin)]]

    async def together(self, prompts: Sequence[Sequence[int]], **how: Any) -> list[Any]:
        """Generate for all prompts at once and return their results."""
        results: list[Any] = [None] * len(prompts)

        async def one(index: int) -> None:
            results[index] = await self.engine.generate(prompts[index], **GREEDY, **how)

        async with anyio.create_task_group() as group:
            for index in range(len(prompts)):
                group.start_soon(one, index)
        return results


def say(**row: Any) -> None:
    """Print a row."""
    print(json.dumps(row), flush=True)


# ---------------------------------------------------------------- quality


async def perplexity(options: argparse.Namespace) -> None:
    """Case ``perplexity``."""
    for at, (tokens, windows) in enumerate(options.windows):
        full: Scores | None = None
        for precision, chunk in (("full", 512), ("int8", 512), ("int4", 512), ("full", 448))[: 3 if at else 4]:
            async with Bench(options, prefix_cache=False, max_batch_tokens=chunk) as bench:
                if tokens >= bench.loop.context_tokens:
                    break
                found = await scores(bench, tokens, windows, precision)
            full = full or found
            row = {"model": options.model, "tokens": tokens, "windows": windows, "precision": precision}
            if chunk != 512:
                row["chunks"] = chunk
            say(case="perplexity", **row, **beside(found, full))


async def scores(bench: Bench, tokens: int, windows: int, precision: str) -> Scores:
    """Return per position the log-probability of the text's token, whether it is the likeliest, and which one is."""
    apart = min(tokens, (len(bench.text) - tokens) // max(1, windows - 1))
    found: Scores = ([], [], [])
    for window in range(windows):
        ids = bench.window(apart * window, tokens)
        how: dict[str, Any] = {"max_tokens": 1, "prompt_logprobs": 1, "kv_precision": precision}
        for one in ((await bench.engine.generate(ids, **GREEDY, **how)).prompt_logprobs or ())[1:]:
            found[0].append(float(one.logprob or 0.0))
            found[1].append(one.top[0].token_id == one.token_id)
            found[2].append(one.top[0].token_id)
    return found


def beside(found: Scores, full: Scores) -> dict[str, Any]:
    """Return what scores say, and say beside those of full precision."""
    count = len(found[0])
    worse = [b - a for a, b in zip(found[0], full[0], strict=True)]  # rise of the loss, in nats
    accuracy, before = sum(found[1]) / count, sum(full[1]) / count
    row: dict[str, Any] = {"positions": count, "perplexity": round(math.exp(-statistics.fmean(found[0])), 4)}
    if found is not full:
        row["change_percent"] = round(100 * math.expm1(statistics.fmean(worse)), 4)
        row["standard_error_percent"] = round(100 * statistics.stdev(worse) / math.sqrt(count), 4)
    row["accuracy_percent"] = round(100 * accuracy, 3)
    if found is not full:
        row["accuracy_change_points"] = round(100 * (accuracy - before), 3)
        same = [a == b for a, b in zip(found[2], full[2], strict=True)]
        row["agreement_percent"] = round(100 * sum(same) / count, 3)
        row["largest_change_nats"] = round(max(map(abs, worse)), 3)
    return row


async def continuations(options: argparse.Namespace) -> None:
    """Case ``similarity``."""
    async with Bench(options, prefix_cache=False) as bench:
        count = options.prompts
        lengths = [64 + (1_536 - 64) * at // max(1, count - 1) for at in range(count)]
        prompts = [bench.window(947 * at, tokens) for at, tokens in enumerate(lengths)]
        full = await bench.together(prompts, max_tokens=NEW_TOKENS, kv_precision="full")
        for precision in KV_PRECISIONS:
            if precision == "full":
                how = {"max_tokens": NEW_TOKENS, "kv_precision": precision}
                found = [(await bench.together([prompt], **how))[0] for prompt in prompts]
            else:
                found = await bench.together(prompts, max_tokens=NEW_TOKENS, kv_precision=precision)
            pairs = [(a.choices[0], b.choices[0]) for a, b in zip(found, full, strict=True)]
            ids = [similarity(a.token_ids, b.token_ids) for a, b in pairs]
            texts = [similarity(a.text, b.text) for a, b in pairs]
            first = [
                next((at for at in range(NEW_TOKENS) if a.token_ids[at] != b.token_ids[at]), NEW_TOKENS)
                for a, b in pairs
            ]
            say(
                case="similarity",
                model=options.model,
                precision=precision,
                prompts=count,
                new_tokens=NEW_TOKENS,
                text_similarity=round(statistics.fmean(texts), 3),
                least_text_similarity=round(min(texts), 3),
                token_similarity=round(statistics.fmean(ids), 3),
                first_difference_median=statistics.median(first),
                same=sum(one == NEW_TOKENS for one in first),
            )


# ---------------------------------------------------------------- memory and speed


async def memory(options: argparse.Namespace) -> None:
    """Case ``memory``."""
    async with Bench(options, kv_device_bytes=options.arena) as bench:
        book = bench.loop._book
        classes = book.ledger.classes
        plain = 0
        for precision in KV_PRECISIONS:
            mine = [one for one in classes if one.precision == precision and not one.tail]
            held = book.capacities[precision]
            plain = plain or held
            say(
                case="memory",
                model=options.model,
                precision=precision,
                arena=options.arena,
                bytes_per_token={one.name: round(one.block_bytes / one.shape[3], 1) for one in mine},
                of_full={
                    one.name: round(one.block_bytes / next(c.block_bytes for c in classes if c.layers == one.layers), 3)
                    for one in mine
                },
                longest_request_tokens=held,
                of_full_tokens=round(held / plain, 2),
            )


async def speed(options: argparse.Namespace) -> None:
    """Case ``speed``."""
    spec = spec_from_config(open_source(options.model).config)
    name = str(choose_dtype(options.dtype)).removeprefix("torch.")
    classes = kv_classes(spec, name, 16, KV_PRECISIONS)
    most = max(options.rows)
    for tokens in options.contexts:
        blocks = -(-(tokens + NEW_TOKENS) // 16) + 2
        need = sum(one.block_bytes * (1 if one.tail else blocks) * (most + 1) for one in classes)
        room = round(1.1 * need) + (8 * most + 64) * slab_bytes(classes)
        async with Bench(options, kv_device_bytes=room) as bench:
            await timed_rows(bench, tokens)


async def timed_rows(bench: Bench, tokens: int) -> None:
    """Print the rows of one length of context."""
    options = bench.options
    prompts = [bench.window(509 * at + 1, tokens) for at in range(max(options.rows))]
    first: dict[KVPrecision, list[float]] = {precision: [] for precision in KV_PRECISIONS}
    for prompt in prompts:
        for precision in KV_PRECISIONS:
            result = await bench.engine.generate(prompt, max_tokens=1, kv_precision=precision, **GREEDY)
            first[precision].append(result.timing.ttft_s)
    prefill = {precision: statistics.median(times) for precision, times in first.items()}
    for rows in options.rows:
        times_of: dict[KVPrecision, list[float]] = {precision: [] for precision in KV_PRECISIONS}
        for turn in range(options.repeat + 1):
            for precision in KV_PRECISIONS:
                results = await bench.together(prompts[:rows], max_tokens=NEW_TOKENS, kv_precision=precision)
                least = min(one.usage.cached_tokens for one in results)
                if turn and least < tokens - 32:
                    raise RuntimeError(f"only {least} of {tokens} tokens were cached: the arena is too small")
                if turn:  # the first round warms up
                    begun = max(one.timing.ttft_s for one in results)
                    ended = max(one.timing.total_s for one in results)
                    times_of[precision].append((ended - begun) / (NEW_TOKENS - 1))
        middle = {precision: statistics.median(times) for precision, times in times_of.items()}
        for precision in KV_PRECISIONS:
            say(
                case="speed",
                model=options.model,
                tokens=tokens,
                rows=rows,
                precision=precision,
                step_ms=round(1000 * middle[precision], 3),
                speedup=round(middle["full"] / middle[precision], 3),
                prefill_tokens_per_s=round(tokens / prefill[precision]),
                prefill_speedup=round(prefill["full"] / prefill[precision], 3),
            )


CASES = {"perplexity": perplexity, "similarity": continuations, "memory": memory, "speed": speed}


def pairs(text: str) -> list[tuple[int, int]]:
    """Return the pairs of "2048x8,7000x3"."""
    return [(int(a), int(b)) for a, b in (one.split("x") for one in text.split(","))]


def numbers(text: str) -> list[int]:
    """Return the numbers of "512,2000"."""
    return [int(one) for one in text.split(",")]


def main() -> None:
    """Run the cases that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--windows", type=pairs, default=[(2_048, 8), (7_000, 3)], help="of perplexity: 2048x8,7000x3")
    parser.add_argument("--prompts", type=int, default=24, help="of similarity")
    parser.add_argument("--arena", default="1GiB", help="of memory")
    parser.add_argument("--contexts", type=numbers, default=[512, 2_000, 7_000], help="of speed, in tokens")
    parser.add_argument("--rows", type=numbers, default=[1, 8], help="of speed")
    parser.add_argument("--repeat", type=int, default=3, help="of speed")
    options = parser.parse_args()
    unknown = set(options.cases.split(",")) - set(CASES)
    if unknown:
        parser.error(f"unknown cases: {', '.join(sorted(unknown))}")
    torch.set_num_threads(options.threads)
    say(case="machine", **machine(), dtype=str(choose_dtype(options.dtype)).removeprefix("torch."))
    for name in options.cases.split(","):
        anyio.run(CASES[name], options)


if __name__ == "__main__":
    main()
