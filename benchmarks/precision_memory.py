"""What a process holds after it has loaded a model: one JSON line, of a process that does nothing else.

    python benchmarks/precision_memory.py smollm2-135m-instruct '{"precision": "asymmetric"}'

The second argument: settings of the engine. The case ``memory`` of ``precision_speed.py`` starts one such process for
each variant. Bytes are the resident set, of these the anonymous part, as the kernel counts them page by page
(``/proc/self/smaps_rollup``): ``before`` after importing kimicore and torch, ``loaded`` once the engine is open,
``touched`` after a byte was written to every page of the KV arena, which until then costs address space alone.
``peak_bytes``: the highest resident set until the engine was open. ``weight_bytes`` and ``arena_bytes``: what the model
says that its weights take, packed ones packed, and the arena's size.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import kimicore


def resident() -> dict[str, int]:
    """Return the bytes of this process that are in memory, and those of them that belong to no file."""
    found = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, size, *_ = line.split()
        found[name] = int(size) * 1024
    return {"bytes": found["Rss:"], "anonymous_bytes": found["Anonymous:"]}


def peak() -> int:
    """Return the highest resident set of this process so far, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def main(model: str, settings: str) -> None:
    """Load a model and print the figures."""
    before = resident()
    with kimicore.SyncEngine(model, kimicore.EngineConfig(**json.loads(settings))) as engine:
        loaded, highest = resident(), peak()
        runner = engine.face.loop.runner
        memory = runner._arena.memory  # type: ignore[attr-defined]
        memory.zero_()
        row = {
            "before": before,
            "loaded": loaded,
            "touched": resident(),
            "peak_bytes": highest,
            "weight_bytes": runner.model.weight_bytes,  # type: ignore[attr-defined]
            "arena_bytes": memory.numel(),
            "torch": torch.__version__,
        }
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} MODEL SETTINGS (an object in JSON)")
    main(*sys.argv[1:])
