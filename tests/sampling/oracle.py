"""A second formulation of sampling: pure Python integers, float64, and a full sort for every filter."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from kimicore.kernels.gumbel.native import NativeGumbel, load
from kimicore.kernels.registry import Ops, select_ops
from kimicore.sampling_params import SamplingParams
from kimicore.types import BoundRow, RowPlan

MULTIPLIERS = {32: (0xD2511F53, 0xCD9E8D57), 64: (0xD2E7470EE14C6C93, 0xCA5A826395121157)}
KEY_STEPS = {32: (0x9E3779B9, 0xBB67AE85), 64: (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)}


def philox(counter: tuple[int, ...], key: tuple[int, ...], bits: int = 32) -> tuple[int, ...]:
    """Philox4x32-10 or, with ``bits`` 64, Philox4x64-10."""
    mask = (1 << bits) - 1
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = MULTIPLIERS[bits][0] * c0, MULTIPLIERS[bits][1] * c2
        c0, c1, c2, c3 = (p1 >> bits) ^ c1 ^ k0, p1 & mask, (p0 >> bits) ^ c3 ^ k1, p0 & mask
        k0, k1 = (k0 + KEY_STEPS[bits][0]) & mask, (k1 + KEY_STEPS[bits][1]) & mask
    return c0, c1, c2, c3


def noise_word(seed: int, choice: int, position: int, token_id: int) -> int:
    """The 32 random bits of one token."""
    return philox((token_id // 4, position, choice, 0), (seed & 0xFFFFFFFF, seed >> 32))[token_id % 4]


def noise(seed: int, choice: int, position: int, token_id: int) -> float:
    """The Gumbel noise of one token, with the C library's logarithm."""
    return -math.log(-math.log((noise_word(seed, choice, position, token_id) + 0.5) / 2**32))


def row(known: list[int], prompt_tokens: int | None = None, **options: Any) -> BoundRow:
    """A row that wants one token after ``known``; ``seed``, ``choice`` and ``banned`` stand beside the parameters."""
    seed, choice, banned = options.pop("seed", 0), options.pop("choice", 0), options.pop("banned", ())
    return BoundRow(
        plan=RowPlan(request=0, start=0, count=len(known), logits_at="last"),
        known=known,
        prompt_tokens=len(known) if prompt_tokens is None else prompt_tokens,
        tables=(),
        sample=options.pop("sample", True),
        params=SamplingParams(**options),
        seed=seed,
        choice=choice,
        banned=tuple(banned),
        rope_tokens=0,
    )


def operations(*, native: bool = True) -> Ops:
    """The operations of the CPU, with native noise where a compiler built it, or with the references alone."""
    return select_ops("cpu", torch.float32, native=native)


def changed(logits: np.ndarray, one: BoundRow) -> np.ndarray:
    """Bias, penalties and bans, token by token in Python floats, rounded to float32 after each of them."""
    params, largest = one.params, float(np.finfo(np.float32).max)

    def narrow(value: float) -> float:
        return value if value == -math.inf else float(np.float32(min(max(value, -largest), largest)))

    values = [float(v) for v in logits]
    for token_id, bias in dict(params.logit_bias).items():
        values[token_id] = narrow(values[token_id] + bias)
    if params.repetition_penalty != 1.0:
        for token_id in set(one.known):
            v = values[token_id]
            values[token_id] = narrow(v / params.repetition_penalty if v > 0 else v * params.repetition_penalty)
    if params.frequency_penalty or params.presence_penalty:
        generated = list(one.known[one.prompt_tokens :])
        for token_id in set(generated):
            cost = generated.count(token_id) * params.frequency_penalty
            values[token_id] = narrow(values[token_id] - cost - params.presence_penalty)
    for token_id in one.banned:
        values[token_id] = -math.inf
    return np.array(values, dtype=np.float32)


def order(logits: np.ndarray) -> list[int]:
    """All ids, the best first and the lower id first of equals."""
    return sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))


def weights(logits: np.ndarray, temperature: float) -> np.ndarray:
    """exp((logits - max) / temperature) in float64."""
    shifted = logits.astype(np.float64) - float(logits.max())
    with np.errstate(over="ignore", under="ignore"):
        return np.exp(shifted / temperature)


def filtered(logits: np.ndarray, params: SamplingParams) -> set[int]:
    """Ids that top-k, then top-p, then min-p keep, by sorting everything and adding up one by one."""
    ids = order(logits)
    weight = weights(logits, params.temperature)
    if params.top_k:
        ids = ids[: params.top_k]
    if params.top_p < 1.0:
        mass, reached, kept = math.fsum(weight[ids]), 0.0, []
        for token_id in ids:
            kept.append(token_id)
            reached += weight[token_id]
            if reached >= params.top_p * mass:
                break
        ids = kept
    return {i for i in ids if weight[i] >= params.min_p}


def probabilities(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The exact distribution that a draw from ``logits`` should have."""
    weight = weights(logits, params.temperature)
    kept = filtered(logits, params)
    weight[[i for i in range(len(weight)) if i not in kept]] = 0.0
    return weight / weight.sum()


def native_gumbel() -> NativeGumbel | None:
    """The native noise, or None where this machine has no compiler."""
    return load()[0]
