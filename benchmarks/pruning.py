"""What a model loses and what it gains as layers go: one JSON line per number of layers.

    python benchmarks/pruning.py [--model smollm2-135m-instruct] [--layers 0,2,4,8] [--prompts 200]

Layers go as ``kimicore prune`` takes them, one after another by their influence (or, with ``--measure kl``, by the loss
without them), chosen once for the largest number: the first of those are the smaller ones. ``agreement`` and ``kl``
are what ``kimicore verify`` measures against the whole model in float32 (see docs/verify.md), and ``edit`` is the
similarity of greedy continuations that an engine with ``skip_layers`` writes by itself, in float32 as well.
``tokens_per_s``: of whole jobs of 1 and 8 requests at once with 32 tokens in and 64 out, in ``--dtype``, the median of
``--repeat`` after one to warm up; numbers of layers take turns. Run it alone. Speed is that of the weights as the file
has them, loss is of the values that they mean.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np
import torch
from attrs import asdict

from engine import TEXT, machine
from kimicore import EngineConfig, SyncEngine
from kimicore.model.load import open_source
from kimicore.model.spec import spec_from_config
from kimicore.pruning.influence import keeping
from kimicore.pruning.run import PruneSettings, choose_layers
from kimicore.verify import Scorer
from kimicore.verify.tally import estimate, similarity

IN_TOKENS, OUT_TOKENS = 32, 64
AT_ONCE = (1, 8)
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}

Rows = dict[int, dict[str, Any]]


def quality(options: argparse.Namespace, skips: dict[int, tuple[int, ...]], layers: int, rows: Rows) -> None:
    """Measure what each number of layers costs: one baseline for all."""
    with Scorer(options.model, prompts=options.prompts, threads=options.threads) as scorer:
        prompts = [scorer.baseline.tokenizer.encode(one.text)[:128] for one in scorer.corpus.prompts]
        for count, skipped in skips.items():
            kept = [one for one in range(layers) if one not in skipped]
            measured = scorer.score(keeping(scorer.baseline.transformer, kept, scorer.baseline.known_tokens))
            config = EngineConfig(
                dtype="float32", precision="none", skip_layers=skipped, threads=options.threads, context_tokens=256
            )
            with SyncEngine(options.model, config) as engine:
                results = engine.generate_many(prompts, max_tokens=scorer.new_tokens, **GREEDY)
            edits = [similarity(one.token_ids, own) for one, own in zip(results, scorer.continuations, strict=True)]
            whole, kinds = measured.all, measured.by_category
            rows[count] |= {
                "prompts": whole.prompts,
                "agreement": short(whole.agreement, 5),
                "kl": short(whole.kl, 6),
                "edit": short(estimate(np.array(edits), scorer.seed), 4),
                "agreement_by_kind": {kind: round(one.agreement.value, 5) for kind, one in kinds.items()},
                "perplexity": round(whole.perplexity or 0.0, 4),
                "baseline_perplexity": round(whole.baseline_perplexity or 0.0, 4),
            }


def short(value: Any, digits: int) -> dict[str, float]:
    """Return an estimate, rounded."""
    return {key: round(one, digits) for key, one in asdict(value).items()}


def speed(options: argparse.Namespace, skips: dict[int, tuple[int, ...]], rows: Rows) -> None:
    """Measure tokens per second: all engines are in memory and take turns."""
    engines = {
        count: SyncEngine(
            options.model,
            EngineConfig(dtype=options.dtype, skip_layers=skipped, threads=options.threads, prefix_cache=False),
        )
        for count, skipped in skips.items()
    }
    try:
        for count, engine in engines.items():
            engine.open()
            model = engine.face.loop.runner.model
            rows[count] |= {"dtype": str(model.dtype).removeprefix("torch."), "weight_bytes": model.weight_bytes}
            rows[count]["tokens_per_s"] = {}
        for at_once in AT_ONCE:
            seconds: dict[int, list[float]] = {count: [] for count in engines}
            for _ in range(1 + options.repeat):
                for count, engine in engines.items():
                    seconds[count].append(job(engine, at_once))
            for count, own in seconds.items():
                rate = at_once * OUT_TOKENS / statistics.median(own[1:])
                rows[count]["tokens_per_s"][str(at_once)] = round(rate, 2)
    finally:
        for engine in engines.values():
            engine.close()


def job(engine: SyncEngine, at_once: int) -> float:
    """Return the seconds of so many requests at once, their prompts all different."""
    ids = engine.face.loop.tokenizer.encode(TEXT.read_text())
    prompts = [ids[7 * number :][:IN_TOKENS] for number in range(at_once)]
    assert all(len(one) == IN_TOKENS for one in prompts)
    start = time.perf_counter()
    results = engine.generate_many(prompts, max_tokens=OUT_TOKENS, **GREEDY)
    assert all(len(one.token_ids) == OUT_TOKENS for one in results)
    return time.perf_counter() - start


def counts(text: str) -> tuple[int, ...]:
    """Return numbers of layers, fewest first."""
    return tuple(sorted({int(one) for one in text.split(",")}))


def main() -> None:
    """Choose the layers, measure, and print a line for each number of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--layers", type=counts, default=(0, 2, 4, 8))
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--measure", default="influence", choices=("influence", "kl"))
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--cases", default="quality,speed")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    print(json.dumps({"case": "machine", **machine()}), flush=True)
    layers = len(spec_from_config(open_source(options.model).config).layers)
    order: list[int] = []
    if max(options.layers):
        settings = PruneSettings(options.measure, samples=options.samples, threads=options.threads)
        choice = choose_layers(options.model, max(options.layers), settings)
        order = [one.layer for one in choice.removals]
        told = [round(one, 5) for one in choice.influence]
        print(json.dumps({"case": "influence", "measure": options.measure, "influence": told, "order": order}))
    skips = {count: tuple(order[:count]) for count in options.layers}
    rows: Rows = {
        count: {"case": "pruning", "model": options.model, "layers_gone": count, "skip_layers": sorted(skipped)}
        for count, skipped in skips.items()
    }
    cases = options.cases.split(",")
    if "quality" in cases:
        quality(options, skips, layers, rows)
    if "speed" in cases:
        speed(options, skips, rows)
    for row in rows.values():
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
