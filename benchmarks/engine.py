"""The engine beside ``transformers`` on the demo model, in one run on one machine: one JSON line per case.

    python benchmarks/engine.py [--model smollm2-135m-instruct] [--cases single,8,32,...] [--repeat 3]

Needs the test extra. Both run in this process and take turns; the same token ids, greedy, end tokens ignored,
two threads each unless ``--threads`` says otherwise, prefix cache off; medians of the repetitions. ``transformers``
generates in the engine's dtype with left-padded batches and its default attention.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import torch

import kimicore
from kimicore.assembly import choose_dtype
from kimicore.model.load import open_source

TEXT = Path(__file__).parent.parent / "tests" / "data" / "alice.txt"
MIB = 1 << 20


class Peer:
    """``transformers`` on the same weights, in the engine's dtype."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        import transformers

        self.name = f"transformers {transformers.__version__} {str(dtype).removeprefix('torch.')}"
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            dtype=dtype,
            quantization_config=transformers.GgufConfig(dequantize=True),
        ).eval()

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
        """Generate ``new_tokens`` for every prompt, as one left-padded batch."""
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
        with torch.inference_mode():
            self.model.generate(ids, attention_mask=mask, **options)


async def concurrent(
    engine: kimicore.Engine, prompts: Sequence[Sequence[int]], new_tokens: int, *, stream: bool = False
) -> list[Any]:
    """Generate for all prompts at once and return their results."""
    results: list[Any] = [None] * len(prompts)
    options: dict[str, Any] = {"max_tokens": new_tokens, "temperature": 0.0, "ignore_eos": True}

    async def one(index: int) -> None:
        if not stream:
            results[index] = await engine.generate(prompts[index], **options)
            return
        async with engine.stream(prompts[index], **options) as chunks:
            async for _ in chunks:
                pass
            results[index] = chunks.result()

    async with anyio.create_task_group() as group:
        for index in range(len(prompts)):
            group.start_soon(one, index)
    return results


def timed(function: Callable[[], Any]) -> float:
    """Return the seconds that ``function`` takes."""
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


class Bench:
    """Both contestants, and prompts for them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.repeat = options.repeat
        self.path = open_source(options.model).path
        torch.set_num_threads(options.threads)
        self.peer = Peer(self.path, choose_dtype(options.dtype))
        config = kimicore.EngineConfig(
            dtype=options.dtype, prefix_cache=False, native_kernels=not options.no_native, kv_device_bytes="1GiB"
        )
        self.engine = kimicore.Engine(self.path, config)
        self.ids: list[int] = []

    async def open(self) -> None:
        """Load the model and warm both up."""
        await self.engine.open()
        self.ids = list(self.engine._face.tokenizer.encode(TEXT.read_text()))
        await concurrent(self.engine, [self.ids[:64]] * 4, 8)
        self.peer.generate([self.ids[:64]] * 4, 8)

    def prompts(self, count: int, low: int = 32, high: int = 512) -> list[list[int]]:
        """Return ``count`` prompts whose lengths go evenly from ``low`` to ``high`` tokens."""
        lengths = [low + (high - low) * i // max(1, count - 1) for i in range(count)]
        return [self.ids[37 * i : 37 * i + length] for i, length in enumerate(lengths)]

    async def beside(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, *, stream: bool = False
    ) -> dict[str, Any]:
        """Run both in turns and return output tokens per second of each over the whole job, and the ratio."""
        ours, theirs, first = [], [], []
        for _ in range(self.repeat):
            begun = time.perf_counter()
            results = await concurrent(self.engine, prompts, new_tokens, stream=stream)
            ours.append(time.perf_counter() - begun)
            first.append(statistics.mean(one.timing.ttft_s for one in results))
            theirs.append(timed(lambda: self.peer.generate(prompts, new_tokens)))
        total = len(prompts) * new_tokens
        mine, other = statistics.median(ours), statistics.median(theirs)
        return {
            "kimicore_tokens_per_s": round(total / mine, 1),
            "peer_tokens_per_s": round(total / other, 1),
            "ratio": round(other / mine, 2),
            "mean_ttft_s": round(statistics.median(first), 3),
        }

    async def decode(self) -> dict[str, Any]:
        """One stream: 128 tokens in, 128 out."""
        return await self.beside([self.ids[:128]], 128)

    async def eight(self) -> dict[str, Any]:
        """8 concurrent requests of 32 to 512 tokens, 64 new tokens each."""
        return await self.beside(self.prompts(8), 64)

    async def thirty_two(self) -> dict[str, Any]:
        """32 concurrent requests of 32 to 512 tokens, 64 new tokens each."""
        return await self.beside(self.prompts(32), 64)

    async def streams(self) -> dict[str, Any]:
        """The same 32 requests read as streams, whose pauses the engine keeps short."""
        return await self.beside(self.prompts(32), 64, stream=True)

    async def prefill(self) -> dict[str, Any]:
        """A prompt of 2,048 tokens and one new token."""
        prompt = self.ids[:2048]
        ours, theirs = [], []
        for _ in range(self.repeat):
            begun = time.perf_counter()
            await concurrent(self.engine, [prompt], 1)
            ours.append(time.perf_counter() - begun)
            theirs.append(timed(lambda: self.peer.generate([prompt], 1)))
        mine, other = statistics.median(ours), statistics.median(theirs)
        return {
            "kimicore_tokens_per_s": round(2048 / mine),
            "peer_tokens_per_s": round(2048 / other),
            "ratio": round(other / mine, 2),
        }

    async def first_token(self) -> dict[str, Any]:
        """Time to the first token of a 128-token prompt: of the first request after the warm-up and of the tenth."""
        ours = []
        for _ in range(10):
            result = (await concurrent(self.engine, [self.ids[:128]], 1))[0]
            ours.append(result.timing.ttft_s)
        theirs = statistics.median(timed(lambda: self.peer.generate([self.ids[:128]], 1)) for _ in range(self.repeat))
        mine = statistics.median(ours)
        return {
            "kimicore_s": round(mine, 4),
            "first_s": round(ours[0], 4),
            "tenth_s": round(ours[-1], 4),
            "peer_s": round(theirs, 4),
            "ratio": round(theirs / mine, 2),
        }

    async def long_beside_streams(self) -> dict[str, Any]:
        """A 4,000-token prompt that arrives beside 8 running streams: their gaps, and its first token."""
        runs = [await concurrent(self.engine, [self.ids[:4000]], 1) for _ in range(2)]
        alone = statistics.mean(one[0].timing.ttft_s for one in runs)
        result: list[float] = []
        loud = await self._gaps(result)
        # as many gaps without the prompt, so that the streams' contexts are as long
        quiet = await self._gaps(None, len(loud) // 8)
        target = self.engine.config.target_step_s
        p99_alone, p99 = _quantile(quiet, 0.99), _quantile(loud, 0.99)
        return {
            "gap_p99_alone_s": round(p99_alone, 4),
            "gap_p50_beside_s": round(_quantile(loud, 0.5), 4),
            "gap_p99_beside_s": round(p99, 4),
            "gap_bound_s": round(max(2 * p99_alone, 1.2 * target), 4),
            "gap_ok": p99 <= max(2 * p99_alone, 1.2 * target),
            "ttft_alone_s": round(alone, 3),
            "ttft_beside_s": round(result[0], 3),
            "ttft_factor": round(result[0] / alone, 2),
            "ttft_ok": result[0] <= 2.5 * alone,
        }

    async def _gaps(self, long: list[float] | None, count: int = 0) -> list[float]:
        """Return the gaps between chunks of 8 streams: ``count`` of each, or with ``long`` while a 4,000-token prompt
        is read."""
        stamps: list[list[float]] = [[] for _ in range(8)]
        window = [0.0, float("inf")]
        done = anyio.Event()

        async def stream(index: int) -> None:
            prompt = self.ids[100 * index : 100 * index + 64]
            async with self.engine.stream(prompt, max_tokens=2000, temperature=0.0, ignore_eos=True) as chunks:
                async for _ in chunks:
                    stamps[index].append(time.perf_counter())
                    if done.is_set():
                        return

        async with anyio.create_task_group() as group:
            for index in range(8):
                group.start_soon(stream, index)
            while min(map(len, stamps)) < 20:
                await anyio.sleep(0.01)
            window[0] = time.perf_counter()
            if long is None:
                while min(map(len, stamps)) < 20 + count:
                    await anyio.sleep(0.01)
            else:
                got = (await concurrent(self.engine, [self.ids[:4000]], 1))[0]
                long.append(got.timing.ttft_s)
            window[1] = time.perf_counter()
            done.set()
        return [
            later - sooner
            for one in stamps
            for sooner, later in itertools.pairwise(one)
            if window[0] <= sooner and later <= window[1]
        ]

    async def loop_lag(self) -> dict[str, Any]:
        """The event loop's largest lag while 16 requests run and a 100,000-character prompt is tokenized."""
        lags: list[float] = []
        text = (TEXT.read_text() * 2)[:100_000]
        done = anyio.Event()

        async def watch() -> None:
            while not done.is_set():
                begun = time.perf_counter()
                await anyio.sleep(0.001)
                lags.append(time.perf_counter() - begun - 0.001)

        async def tokenize() -> None:
            tokenizer = self.engine._face.tokenizer  # off the loop as the engine does, but without its limit
            for turn in range(5):  # each text is new to the tokenizer's cache
                await anyio.to_thread.run_sync(tokenizer.encode, text[turn:])

        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            async with anyio.create_task_group() as work:
                work.start_soon(tokenize)
                work.start_soon(concurrent, self.engine, self.prompts(16, 32, 200), 64)
            done.set()
        lags.sort()
        return {
            "largest_ms": round(1000 * lags[-1], 2),
            "p99_ms": round(1000 * _quantile(lags, 0.99), 2),
            "looks": len(lags),
            "ok": lags[-1] < 0.020,
        }

    async def memory(self) -> dict[str, Any]:
        """Peak anonymous memory of a fresh process over one that has imported torch and loaded the tokenizer."""
        done = await anyio.run_process([sys.executable, __file__, "--memory-child", str(self.path)], stderr=None)
        return dict(json.loads(done.stdout))


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def memory_child(path: str) -> None:
    """Print the peak of this process, which first loads the tokenizer alone and then serves 32 requests."""
    from kimicore.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_source(open_source(path).text)
    ids = tokenizer.encode(TEXT.read_text())
    base = peak = _anonymous()
    stop = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not stop.wait(0.002):
            peak = max(peak, _anonymous())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    arena = 256 * MIB
    config = kimicore.EngineConfig(dtype="auto", kv_device_bytes=arena, prefix_cache=False)
    with kimicore.SyncEngine(path, config) as engine:
        weights = engine.face.loop.runner.model.weight_bytes  # type: ignore[attr-defined]
        prompts = [ids[50 * i : 50 * i + 300] for i in range(32)]
        engine.generate_many(prompts, max_tokens=32, temperature=0.0, ignore_eos=True)
        engine.generate(ids[:4000], max_tokens=1, prompt_logprobs=0)
    stop.set()
    thread.join()
    over = peak - base - weights - arena
    figures = {"base": base, "peak": peak, "weights": weights, "arena": arena, "over_weights_and_arena": over}
    print(json.dumps({**{f"{k}_mib": v // MIB for k, v in figures.items()}, "ok": over <= 300 * MIB}))


CASES = {
    "single": Bench.decode,
    "8": Bench.eight,
    "32": Bench.thirty_two,
    "32-streams": Bench.streams,
    "prefill": Bench.prefill,
    "first-token": Bench.first_token,
    "long-beside-streams": Bench.long_beside_streams,
    "loop-lag": Bench.loop_lag,
    "memory": Bench.memory,
}


def machine() -> dict[str, Any]:
    """Return what the figures were measured on."""
    model = next(
        (one.split(":")[1].strip() for one in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in one),
        platform.processor(),
    )
    capability = torch.backends.cpu.get_cpu_capability()
    return {
        "processor": model,
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "vector": capability,
        "avx512_bf16": torch.cpu._is_avx512_bf16_supported(),
        "amx": torch.cpu._is_amx_tile_supported(),
        "torch": torch.__version__,
        "kimicore": kimicore.__version__,
    }


async def run(options: argparse.Namespace) -> None:
    """Run the chosen cases and print their lines."""
    bench = Bench(options)
    await bench.open()
    async with bench.engine:
        print(json.dumps({"case": "machine", "peer": bench.peer.name, **machine()}), flush=True)
        for name in options.cases.split(","):
            print(json.dumps({"case": name, **(await CASES[name](bench))}), flush=True)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="auto", help="as of EngineConfig, for both: auto is what is best here")
    parser.add_argument("--no-native", action="store_true", help="torch's own operations only")
    parser.add_argument("--memory-child", metavar="PATH", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_child:
        memory_child(options.memory_child)
        return
    unknown = set(options.cases.split(",")) - set(CASES)
    if unknown:
        parser.error(f"unknown cases: {', '.join(sorted(unknown))}")
    anyio.run(run, options)


if __name__ == "__main__":
    main()
