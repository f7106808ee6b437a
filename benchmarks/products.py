"""Products with packed weights beside the dense bfloat16 product, in one run on one machine: one JSON line per shape.

    python benchmarks/products.py [--shapes 3072x576,8192x2048] [--rows 1,8,32,128,512] [--threads 2]

Weights come from memory, as a model's do: there are so many copies of each that they fill 100 MB. Figures are ratios of
the dense product's time to the packed one's, of the least times of some tries; ``oneDNN``: torch's own product.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from engine import machine
from kimicore.kernels.packed_linear.layout import PackedWeight, pack_codes
from kimicore.kernels.registry import Ops, select_ops

MEMORY_BYTES = 100 << 20
TRIES = 5


@frozen
class Form:
    """How a weight is kept: bits, the columns that share a scale (0: a row), and whether there are offsets as well."""

    bits: int
    group: int
    offsets: bool = False

    def weight(self, outs: int, depth: int, noise: torch.Generator) -> PackedWeight:
        """Return a random weight."""
        group = self.group or depth
        codes = torch.randint(0, 1 << self.bits, (outs, depth), generator=noise, dtype=torch.uint8)
        scales = torch.rand((outs, depth // group), generator=noise).half() / depth
        offsets = -8 * scales if self.offsets else None
        zero = 0 if self.offsets else 1 << self.bits - 1
        packed = pack_codes(codes, self.bits)
        return PackedWeight(outs, depth, self.bits, group, packed, scales, zero, offsets=offsets)


FORMS = {
    "int4-g64": Form(4, 64),
    "int4-g32": Form(4, 32),
    "Q4_1": Form(4, 32, offsets=True),
    "int5": Form(5, 32),
    "int8": Form(8, 0),
}


def fastest(product: Callable[[Tensor, Any], Tensor], x: Tensor, weights: list[Any]) -> float:
    """Return the least seconds that one product took."""
    best = float("inf")
    for _ in range(TRIES):
        begun = time.perf_counter()
        for weight in weights:
            product(x, weight)
        best = min(best, (time.perf_counter() - begun) / len(weights))
    return best


def measured(ops: Ops, outs: int, depth: int, counts: list[int]) -> dict[str, Any]:
    """Return for each number of rows the dense product's microseconds, and the ratios of the others to it."""
    noise = torch.Generator().manual_seed(1)
    copies = max(1, MEMORY_BYTES // (2 * outs * depth))
    dense = [torch.randn(outs, depth, generator=noise).bfloat16() / depth for _ in range(copies)]
    packed = {
        name: [ops.arrange(form.weight(outs, depth, noise)) for _ in range(copies)]
        for name, form in FORMS.items()
        if not form.group or depth % form.group == 0
    }
    found: dict[str, Any] = {}
    for rows in counts:
        x = torch.randn(rows, depth, generator=noise).bfloat16()
        base = fastest(ops.linear, x, dense)
        line = {"dense_us": round(1e6 * base), "oneDNN": round(base / fastest(torch.nn.functional.linear, x, dense), 2)}
        line |= {name: round(base / fastest(ops.packed_linear, x, own), 2) for name, own in packed.items()}
        line["int4-g64 x int8"] = round(base / fastest(ops.packed_linear_int8, x, packed["int4-g64"]), 2)
        found[str(rows)] = line
    return found


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="3072x576,576x1536,8192x2048,2048x8192", help="outputs x inputs")
    parser.add_argument("--rows", default="1,8,32,128,512")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ops = select_ops("cpu", torch.bfloat16)
    print(json.dumps({"case": "machine", **machine()}), flush=True)
    for shape in options.shapes.split(","):
        outs, depth = map(int, shape.split("x"))
        found = measured(ops, outs, depth, [int(one) for one in options.rows.split(",")])
        print(json.dumps({"case": "product", "weight": shape, "rows": found}), flush=True)


if __name__ == "__main__":
    main()
