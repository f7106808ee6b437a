"""What weights and activations in fewer bits save in time and memory: one JSON line per case, model and variant.

    python benchmarks/precision_speed.py [--model smollm2-135m-instruct] [--cases decode,prefill,memory] [--repeat 5]

``--model`` may be repeated. ``baseline``: every weight in the engine's dtype. ``asymmetric``, ``uniform-int4`` and
``uniform-int8``: rounded to nearest by that map while they are loaded. ``stored``: a GGUF file as it is. In ``decode``
and ``prefill`` all variants are in memory and take turns, the prefix cache is off, figures are the best of ``--repeat``
turns, and ``ratio`` is how many times as fast as the baseline a variant is. Run it alone.

``decode``: tokens per second of 1, 8 and 32 streams together while they decode, greedily, after prompts of 24 tokens:
from the moment when the last of them has its first token to the end. ``read_bytes``: of weights, in each step;
``limit``: the baseline's over the variant's, which is the ratio of a machine that waits for memory alone.

``prefill``: seconds of a prompt of 2,048 tokens with one new token, another prompt in each turn. ``asymmetric`` has
activations in 8 bits but for the ends of the prompt, ``asymmetric-16-bit`` the same weights with all in 16; the uniform
maps have 8 bits at all positions.

``memory``: each variant is loaded by a fresh process (``precision_memory.py``). ``loaded_bytes``: its resident set
then, less what it was after importing kimicore and torch; ``touched_bytes``: the same after writing to every page of
the KV arena of ``--arena``; ``ratio``: that over weights and arena. ``loaded_ratio``: ``loaded_bytes`` over the weights
alone, since an arena that nothing was written to takes no memory. ``anonymous_ratio``: of ``touched_bytes``, without
the pages of files, such as torch's code, that loading was the first to read. ``peak_bytes``: the most while loading.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import asdict, frozen
from precision import MAPS

from engine import TEXT, machine
from kimicore import EngineConfig, SyncEngine
from kimicore.assembly import choose_dtype
from kimicore.kernels.registry import select_ops
from kimicore.model.load import open_source
from kimicore.model.products import tensors_of
from kimicore.model.transformer import Transformer
from kimicore.text.tokenizer import Tokenizer

CHILD = Path(__file__).with_name("precision_memory.py")
DECODE_PROMPT_TOKENS = 24
MOST_RATIO = 1.15
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


@frozen
class Variant:
    """A name, and the settings of its engine that differ from the baseline's."""

    name: str
    settings: Mapping[str, Any]


def stored(model: str) -> list[Variant]:
    """Return the variants of a model: weights by map, and as they are stored where that is quantized."""
    found = [Variant("baseline", {"precision": "none"}), *[Variant(name, {"precision": name}) for name in MAPS]]
    return [*found, Variant("stored", {})] if open_source(model).path.suffix == ".gguf" else found


def rounded() -> list[Variant]:
    """Return the variants with activations in 8 bits, and what they are compared with."""
    everywhere = {"policy": {"precision": {"activations": "int8"}}}
    return [
        Variant("baseline", {"precision": "none"}),
        Variant("asymmetric", {"precision": "asymmetric"}),
        Variant("asymmetric-16-bit", {"precision": "asymmetric", "activations": "16-bit"}),
        Variant("uniform-int4", {"precision": "uniform-int4", **everywhere}),
        Variant("uniform-int8", {"precision": "uniform-int8", **everywhere}),
    ]


class Prompts:
    """Prompts from places of a text, as a model reads it."""

    def __init__(self, model: str, seed: int) -> None:
        tokenizer = Tokenizer.from_source(open_source(model).text)
        self._ids = tokenizer.encode(TEXT.read_text(encoding="utf-8"))
        self._random = random.Random(seed)

    def check(self, tokens: int) -> None:
        """End the program where the text is shorter."""
        if tokens > len(self._ids):
            raise SystemExit(f"--prompt {tokens}: the text has {len(self._ids)} tokens of this model; ask for fewer")

    def next(self, tokens: int) -> list[int]:
        """Return a prompt of so many tokens."""
        start = self._random.randrange(len(self._ids) - tokens + 1)
        return list(self._ids[start : start + tokens])


@contextmanager
def opened(options: argparse.Namespace, model: str, chosen: Sequence[Variant]) -> Iterator[dict[str, SyncEngine]]:
    """Run the body with all variants in memory, by name."""
    shared = {"dtype": options.dtype, "threads": options.threads, "kv_device_bytes": "512MiB", "prefix_cache": False}
    with ExitStack() as stack:
        yield {
            one.name: stack.enter_context(SyncEngine(model, EngineConfig(**shared, **one.settings))) for one in chosen
        }


def model_of(engine: SyncEngine) -> Transformer:
    """Return an engine's model."""
    found: Transformer = engine.face.loop.runner.model  # type: ignore[attr-defined]
    return found


def say(case: str, model: str, variant: str, row: Mapping[str, Any]) -> None:
    """Print a line."""
    print(json.dumps({"case": case, "model": model, "variant": variant, **row}), flush=True)


# ---------------------------------------------------------------- time


def read_bytes(model: Transformer) -> int:
    """Return the bytes of weights that a step of few tokens reads: all, but an embedding that is not the head too."""
    weights = model.weights
    if weights.embedding is weights.head:
        return model.weight_bytes
    return model.weight_bytes - sum([one.numel() * one.element_size() for one in tensors_of(weights.embedding)])


def decoding_rate(engine: SyncEngine, prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
    """Return tokens per second of all streams together, from the last one's first token to the end."""
    found = engine.generate_many(prompts, max_tokens=new_tokens, **GREEDY)
    begun = max(one.timing.ttft_s for one in found)
    return len(prompts) * (new_tokens - 1) / (max(one.timing.total_s for one in found) - begun)


def decode(options: argparse.Namespace, model: str) -> None:
    """Case ``decode``."""
    texts = Prompts(model, options.seed)
    with opened(options, model, stored(model)) as engines:
        rates: dict[str, dict[str, float]] = {name: {} for name in engines}
        for streams, new_tokens in options.streams:
            best = dict.fromkeys(engines, 0.0)
            for _ in range(options.repeat):
                prompts = [texts.next(DECODE_PROMPT_TOKENS) for _ in range(streams)]
                for name, engine in engines.items():
                    best[name] = max(best[name], decoding_rate(engine, prompts, new_tokens))
            for name, rate in best.items():
                rates[name][str(streams)] = rate
        base = rates["baseline"]
        bytes_of = {name: read_bytes(model_of(engine)) for name, engine in engines.items()}
        for name, own in rates.items():
            row = {
                "read_bytes": bytes_of[name],
                "limit": round(bytes_of["baseline"] / bytes_of[name], 2),
                "tokens_per_s": {streams: round(rate, 1) for streams, rate in own.items()},
                "ratio": {streams: round(rate / base[streams], 2) for streams, rate in own.items()},
            }
            say("decode", model, name, row)


def prefill(options: argparse.Namespace, model: str) -> None:
    """Case ``prefill``."""
    texts = Prompts(model, options.seed)
    texts.check(options.prompt)
    with opened(options, model, rounded()) as engines:
        best = dict.fromkeys(engines, float("inf"))
        for _ in range(options.repeat):
            prompt = texts.next(options.prompt)
            for name, engine in engines.items():
                begun = time.perf_counter()
                engine.generate(prompt, max_tokens=1, **GREEDY)
                best[name] = min(best[name], time.perf_counter() - begun)
        for name, seconds in best.items():
            own = model_of(engines[name]).activations
            row = {
                "prompt_tokens": options.prompt,
                "activations": None if own is None else asdict(own),
                "seconds": round(seconds, 6),
                "tokens_per_s": round(options.prompt / seconds),
                "ratio": round(best["baseline"] / seconds, 2),
            }
            say("prefill", model, name, row)


# ---------------------------------------------------------------- memory


def memory(options: argparse.Namespace, model: str) -> None:
    """Case ``memory``."""
    shared = {"dtype": options.dtype, "threads": options.threads, "kv_device_bytes": options.arena}
    for one in stored(model):
        found = loaded_apart(model, {**shared, **one.settings})
        before, after = found["before"], found["touched"]
        weights, arena = found["weight_bytes"], found["arena_bytes"]
        grown = {name: after[name] - before[name] for name in before}
        loaded = found["loaded"]["bytes"] - before["bytes"]
        ratio = grown["bytes"] / (weights + arena)
        row = {
            "weight_bytes": weights,
            "arena_bytes": arena,
            "before_bytes": before["bytes"],
            "loaded_bytes": loaded,
            "loaded_ratio": round(loaded / weights, 3),
            "touched_bytes": grown["bytes"],
            "ratio": round(ratio, 3),
            "anonymous_ratio": round(grown["anonymous_bytes"] / (weights + arena), 3),
            "peak_bytes": found["peak_bytes"] - before["bytes"],
            "ok": ratio <= MOST_RATIO,
        }
        say("memory", model, one.name, row)


def loaded_apart(model: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a fresh process that loads a model with these settings."""
    command = [sys.executable, str(CHILD), model, json.dumps(settings)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: ended with status {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# ---------------------------------------------------------------- the command line


CASES = {"decode": decode, "prefill": prefill, "memory": memory}


def pairs(text: str) -> list[tuple[int, int]]:
    """Return the pairs of "1x96,8x64": streams and their new tokens."""
    found = [(int(a), int(b)) for a, b in (one.split("x") for one in text.split(","))]
    if any(streams < 1 or new_tokens < 2 for streams, new_tokens in found):
        raise argparse.ArgumentTypeError(f"{text}: needs at least one stream and two new tokens")
    return found


def positive(text: str) -> int:
    """Return a number from 1."""
    if (found := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return found


def main() -> None:
    """Run the cases that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help="smollm2-135m-instruct; may be repeated")
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--streams", type=pairs, default=pairs("1x96,8x64,32x48"), help="of decode: 1x96,8x64,32x48")
    parser.add_argument("--prompt", type=positive, default=2048, help="tokens, of prefill (2048)")
    parser.add_argument("--arena", default="256MiB", help="of memory (256MiB)")
    parser.add_argument("--repeat", type=positive, default=5, help="turns, of decode and prefill (5)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of the prompts' places in the text")
    options = parser.parse_args()
    if unknown := set(options.cases.split(",")) - set(CASES):
        parser.error(f"unknown cases: {', '.join(sorted(unknown))}")
    torch.set_num_threads(options.threads)
    dtype = choose_dtype(options.dtype)
    ways = {one.op: f"{one.implementation}: {one.why}" for one in select_ops("cpu", dtype).origins}
    products = {name: ways[name] for name in ("linear", "packed_linear", "packed_linear_int8")}
    told = {"dtype": str(dtype).removeprefix("torch."), "products": products}
    print(json.dumps({"case": "machine", **machine(), **told}), flush=True)
    for model in options.model or ["smollm2-135m-instruct"]:
        for name in options.cases.split(","):
            CASES[name](options, model)


if __name__ == "__main__":
    main()
