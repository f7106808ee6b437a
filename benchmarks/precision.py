"""Weights in fewer bits, by what they cost in quality and what they save: one JSON line per variant.

    python benchmarks/precision.py [--model smollm2-135m-instruct] [--cases quality,bytes,speed] [--prompts 1000]

Variants: ``baseline`` (every weight in the engine's dtype), ``asymmetric``, ``uniform-int4`` and ``uniform-int8`` (the
baseline's weights, rounded to nearest by that map while they are loaded), ``stored`` (a file that is quantized already,
as it is: the model itself where it is a GGUF file, else ``--stored FILE``), and each ``--also NAME=MODEL``, such as a
folder that ``kimicore quantize`` wrote.

``quality``: what ``kimicore verify`` measures against the baseline in float32 (see docs/verify.md): agreement and KL
over the baseline's continuations, edit similarity of a variant's own, and perplexity by kind of text. Variants compute
in ``--quality-dtype``; the line of ``baseline`` is always bfloat16's, which is the noise floor. ``bytes``: of the
weights in memory, with and without embedding and head. ``speed``: tokens per second of whole jobs of 1, 8 and 32
requests at once with 32 tokens in and 64 out, the median of ``--repeat`` after one to warm up, in ``--dtype``; variants
take turns. Run it alone.

A demo model comes as a GGUF file: its weights were quantized before anything here was measured. The baseline has the
values of that file, so further rounding is measured exactly, but the model that it was made from would be somewhat
better, and less used to coarse weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from attrs import asdict, evolve, frozen

from engine import TEXT, machine
from kimicore import SyncEngine
from kimicore.assembly import choose_dtype
from kimicore.model.load import open_source
from kimicore.model.products import tensors_of
from kimicore.verify import Measured, ModelChoice, Scorer
from kimicore.verify.opened import OpenedModel

CASES = ("quality", "bytes", "speed")
MAPS = ("asymmetric", "uniform-int4", "uniform-int8")
IN_TOKENS, OUT_TOKENS = 32, 64


@frozen
class Variant:
    """A name and the model as it is loaded."""

    name: str
    choice: ModelChoice


def variants(options: argparse.Namespace) -> list[Variant]:
    """Return what is compared."""
    found = [Variant("baseline", ModelChoice(options.model, options.dtype, "none"))]
    found += [Variant(name, ModelChoice(options.model, options.dtype, name)) for name in MAPS]
    stored = options.stored or (options.model if open_source(options.model).path.suffix == ".gguf" else None)
    if stored is not None:
        found.append(Variant("stored", ModelChoice(stored, options.dtype)))
    for pair in options.also:
        name, _, model = pair.partition("=")
        found.append(Variant(name, ModelChoice(model, options.dtype)))
    return found if options.only is None else [one for one in found if one.name in options.only.split(",")]


def quality(options: argparse.Namespace, chosen: Sequence[Variant], rows: dict[str, dict[str, Any]]) -> None:
    """Case ``quality``: one baseline for all variants."""
    with Scorer(
        options.model, prompts=options.prompts, threads=options.threads, texts=options.text, seed=options.seed
    ) as scorer:
        for one in chosen:
            if one.name == "baseline":
                rows[one.name] |= told(scorer.noise(), "bfloat16")
            else:
                choice = evolve(one.choice, dtype=options.quality_dtype)
                rows[one.name] |= told(scorer.score_model(choice)[0], options.quality_dtype)
            print(json.dumps(rows[one.name]), file=sys.stderr, flush=True)  # a long run may be cut off


def told(measured: Measured, dtype: str) -> dict[str, Any]:
    """Return a variant's figures, rounded."""
    whole, kinds = measured.all, measured.by_category

    def short(estimate: Any, digits: int) -> dict[str, float]:
        return {key: round(value, digits) for key, value in asdict(estimate).items()}

    return {
        "quality_dtype": dtype,
        "prompts": whole.prompts,
        "positions": whole.positions,
        "agreement": short(whole.agreement, 5),
        "kl": short(whole.kl, 6),
        "edit": None if whole.edit is None else short(whole.edit, 4),
        "agreement_by_kind": {kind: round(one.agreement.value, 5) for kind, one in kinds.items()},
        "kl_by_kind": {kind: round(one.kl.value, 6) for kind, one in kinds.items()},
        "perplexity": {kind: round(one.perplexity or 0.0, 4) for kind, one in kinds.items()},
        "baseline_perplexity": {kind: round(one.baseline_perplexity or 0.0, 4) for kind, one in kinds.items()},
    }


def weight_bytes(options: argparse.Namespace, chosen: Sequence[Variant], rows: dict[str, dict[str, Any]]) -> None:
    """Case ``bytes``: of the weights in memory; a tied head counts once."""
    for one in chosen:
        with OpenedModel(one.choice, tokens=256, threads=options.threads, progress=None) as opened:
            weights, total = opened.transformer.weights, opened.transformer.weight_bytes
            tensors = [*tensors_of(weights.embedding), *tensors_of(weights.head)]
            tables = {each.data_ptr(): each.numel() * each.element_size() for each in tensors}
            rows[one.name] |= {
                "weight_bytes": total,
                "weight_bytes_without_tables": total - sum(tables.values()),
                "packed": opened.transformer.packed,
            }


def speed(options: argparse.Namespace, chosen: Sequence[Variant], rows: dict[str, dict[str, Any]]) -> None:
    """Case ``speed``: all variants are in memory and take turns."""
    engines = {one.name: SyncEngine(one.choice.model, one.choice.config(512, options.threads)) for one in chosen}
    try:
        for engine in engines.values():
            engine.open()
        text = next(iter(engines.values())).face.tokenizer.encode(TEXT.read_text()[:60_000])
        for count in options.rows:
            prompts = [text[97 * at : 97 * at + IN_TOKENS] for at in range(count)]
            taken: dict[str, list[float]] = {name: [] for name in engines}
            for turn in range(options.repeat + 1):
                for name, engine in engines.items():
                    begun = time.perf_counter()
                    engine.generate_many(prompts, max_tokens=OUT_TOKENS, temperature=0.0, ignore_eos=True)
                    if turn:  # the first round warms up
                        taken[name].append(time.perf_counter() - begun)
            for name, seconds in taken.items():
                rate = round(count * OUT_TOKENS / statistics.median(seconds), 1)
                rows[name].setdefault("tokens_per_s", {})[str(count)] = rate
    finally:
        for engine in engines.values():
            engine.close()


def numbers(text: str) -> list[int]:
    """Return the numbers of "1,8,32"."""
    return [int(one) for one in text.split(",")]


def main() -> None:
    """Run the cases that were asked for and print a line per variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--stored", metavar="FILE", help="a file that is quantized already, of the same vocabulary")
    parser.add_argument("--also", action="append", default=[], metavar="NAME=MODEL", help="one more variant")
    parser.add_argument("--only", metavar="NAMES", help="of the variants: baseline,asymmetric,...")
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--prompts", type=int, default=1000, help="of quality (1000)")
    parser.add_argument("--text", action="append", default=[], metavar="FILE", help="own texts for quality")
    parser.add_argument("--quality-dtype", default="float32", help="of the variants in quality (float32)")
    parser.add_argument("--dtype", default="auto", help="of bytes and speed (auto)")
    parser.add_argument("--rows", type=numbers, default=[1, 8, 32], help="requests at once, of speed")
    parser.add_argument("--repeat", type=int, default=3, help="of speed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    unknown = set(options.cases.split(",")) - set(CASES)
    if unknown:
        parser.error(f"unknown cases: {', '.join(sorted(unknown))}")
    torch.set_num_threads(options.threads)
    dtype = str(choose_dtype(options.dtype)).removeprefix("torch.")
    print(json.dumps({"case": "machine", **machine(), "dtype": dtype}), flush=True)
    chosen = variants(options)
    rows: dict[str, dict[str, Any]] = {
        one.name: {"variant": one.name, "model": str(one.choice.model), "precision": one.choice.precision}
        for one in chosen
    }
    for name in options.cases.split(","):
        {"quality": quality, "bytes": weight_bytes, "speed": speed}[name](options, chosen, rows)
    for row in rows.values():
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
