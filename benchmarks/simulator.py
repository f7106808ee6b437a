"""The simulator beside the real engine: predicted and measured makespan and mean time to the first token.

    python benchmarks/simulator.py [--model smollm2-135m-instruct] [--seconds 40] [--fit times.json] [--repeat 2]

Step times are fitted on a calibration load (what ``kimicore bench --fit`` runs), then three other loads run on the same
engine: all requests at once, a Poisson process read as streams, and bursts of long prompts with short answers.
Each load is sized by the simulator to take about ``--seconds``. The machine should be quiet. One JSON line per load;
``ok`` says that both figures are within 15 % of the engine's.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import anyio
from attrs import asdict, evolve, frozen

import kimicore
from kimicore.sim.cost import StepTimes
from kimicore.sim.loads import Lengths, bursts, poisson, scaled
from kimicore.sim.measure import fit_engine
from kimicore.sim.settings import SimConfig
from kimicore.sim.simulator import simulate
from kimicore.sim.traces import TraceRequest

BOUND = 0.15
TALK = Lengths(
    prompt_median=90.0, prompt_sigma=0.9, output_median=24.0, output_sigma=0.7, most_prompt_tokens=600,
    most_output_tokens=80,
)  # fmt: skip
READ = Lengths(
    prompt_median=350.0, prompt_sigma=0.5, output_median=6.0, output_sigma=0.5, most_prompt_tokens=1000,
    most_output_tokens=20,
)  # fmt: skip


@frozen
class Load:
    """A load of a name: its requests, and whether they are read as streams."""

    name: str
    requests: Sequence[TraceRequest]
    streamed: bool


def together(count: int) -> list[TraceRequest]:
    """Return ``count`` requests that come at once."""
    drawn = poisson(1.0, 100.0 + 2.0 * count, seed=11, lengths=TALK)[:count]
    return [evolve(one, arrived_s=0.0) for one in drawn]


def sized(make: Callable[[int], list[TraceRequest]], config: SimConfig, seconds: float) -> list[TraceRequest]:
    """Return the load of the count for which the simulator predicts about ``seconds``."""
    low, high = 1, 1
    while simulate(make(high), config=config).makespan_s < seconds and high < 4096:
        low, high = high, 2 * high
    while low < high:
        middle = (low + high + 1) // 2
        if simulate(make(middle), config=config).makespan_s <= seconds:
            low = middle
        else:
            high = middle - 1
    return make(low)


def arriving(make: Callable[..., list[TraceRequest]], lengths: Lengths, config: SimConfig) -> Callable[[int], Any]:
    """Return what makes a load of a count of requests that keeps the engine busy for about 70 % of the time."""

    def of(count: int) -> list[TraceRequest]:
        drawn = make(1.0, 400.0 + 4.0 * count, seed=12, lengths=lengths)[: max(2, count)]
        start_s = drawn[0].arrived_s
        drawn = [evolve(one, arrived_s=one.arrived_s - start_s) for one in drawn]
        busy_s = simulate(drawn, config=config).record.busy_s
        return scaled(drawn, drawn[-1].arrived_s / (busy_s / 0.7))

    return of


def loads(config: SimConfig, seconds: float) -> list[Load]:
    """Return the three loads."""
    plain = evolve(config, streamed=False)
    return [
        Load("together", sized(together, plain, seconds), False),
        Load("poisson, streamed", sized(arriving(poisson, TALK, config), config, seconds), True),
        Load("bursts of long prompts", sized(arriving(bursts, READ, plain), plain, seconds), False),
    ]


async def run(engine: kimicore.Engine, load: Load) -> tuple[float, float]:
    """Run a load on the engine; return makespan and mean time to the first token, in seconds."""
    source = random.Random(5)
    words = list(
        engine.face.tokenizer.encode("It was a bright cold day in April, and the clocks were striking thirteen.")
    )
    ends, firsts = [], []
    begun_s = time.perf_counter()

    async def one(request: TraceRequest) -> None:
        prompt = [source.choice(words) for _ in range(request.prompt_tokens)]
        await anyio.sleep(max(0.0, begun_s + request.arrived_s - time.perf_counter()))
        options: dict[str, Any] = {"max_tokens": request.output_tokens, "temperature": 0.0, "ignore_eos": True}
        if load.streamed:
            async with engine.stream(prompt, **options) as stream:
                async for _ in stream:
                    pass
                result = stream.result()
        else:
            result = await engine.generate(prompt, **options)
        ends.append(time.perf_counter())
        firsts.append(result.timing.ttft_s)

    async with anyio.create_task_group() as group:
        for request in load.requests:
            group.start_soon(one, request)
    return max(ends) - begun_s, sum(firsts) / len(firsts)


async def compare(options: argparse.Namespace, engine_config: kimicore.EngineConfig, times: StepTimes) -> None:
    """Run every load on the engine and in the simulator, and print both."""
    async with kimicore.Engine(options.model, engine_config) as engine:
        config = SimConfig(
            max_batch_size=engine_config.max_batch_size,
            max_batch_tokens=engine_config.max_batch_tokens,
            target_step_s=engine_config.target_step_s,
            block_tokens=engine_config.block_tokens,
            kv_blocks=engine.stats().kv_blocks_total,
            times=times,
        )
        await engine.generate("warm", max_tokens=4, ignore_eos=True)
        for load in loads(config, options.seconds):
            report = simulate(load.requests, config=evolve(config, streamed=load.streamed))
            first = report.summary()["ttft_s"]["mean"]
            runs = [await run(engine, load) for _ in range(options.repeat)]
            makespan_s, ttft_s = (sorted(one[at] for one in runs)[(len(runs) - 1) // 2] for at in (0, 1))
            errors = {"makespan": report.makespan_s / makespan_s - 1.0, "ttft": first / ttft_s - 1.0}
            line = {
                "load": load.name,
                "requests": len(load.requests),
                "makespan_s": round(makespan_s, 2),
                "predicted_makespan_s": round(report.makespan_s, 2),
                "mean_ttft_s": round(ttft_s, 3),
                "predicted_mean_ttft_s": round(first, 3),
                **{f"{name}_error": round(error, 3) for name, error in errors.items()},
                "ok": max(map(abs, errors.values())) <= BOUND,
            }
            print(json.dumps(line), flush=True)


def main() -> None:
    """Read the command line, fit, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of each load, as predicted")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each load; the lower median counts")
    parser.add_argument("--fit", metavar="FILE", help="step times that were fitted before, instead of fitting now")
    options = parser.parse_args()
    config = kimicore.EngineConfig(dtype=options.dtype, prefix_cache=False, kv_device_bytes="256MiB")
    if options.fit:
        times = StepTimes.read(options.fit)
    else:
        begun_s = time.perf_counter()
        with kimicore.SyncEngine(options.model, config) as engine:
            found = fit_engine(engine, repeat=2)
        times = found.times
        fitted_s = round(time.perf_counter() - begun_s, 1)
        print(
            json.dumps({"steps": found.measurements, "mean_error": round(found.mean_error, 3), "seconds": fitted_s}),
            flush=True,
        )
    print(json.dumps({"times": asdict(times)}), flush=True)
    anyio.run(compare, options, config, times)


if __name__ == "__main__":
    main()
