"""The kits by kind, and finding out of which kind a policy is."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

from kimicore.testing.batching import check_batching
from kimicore.testing.eviction import check_eviction
from kimicore.testing.padding import check_padding
from kimicore.testing.precision import check_precision
from kimicore.testing.promises import Check

__all__ = ["check_policy", "kind_of"]


def check_policy(
    kind: str, maker: Callable[[], Any], *, examples: int = 60, steps: int = 30, seed: int = 0
) -> list[Check]:
    """Return the checks of a policy of ``kind``: see :func:`kimicore.testing.check_eviction` and the like."""
    kits: dict[str, Callable[..., list[Check]]] = {
        "batching": check_batching,
        "eviction": check_eviction,
        "padding": check_padding,
        "precision": check_precision,
    }
    return kits[kind](maker, examples=examples, steps=steps, seed=seed)


def kind_of(policy: Any) -> str | None:
    """Return of which kind a policy is, by its methods; None where that cannot be said."""
    if callable(getattr(policy, "rules", None)):
        return "precision"
    if callable(getattr(policy, "shape", None)):
        return "padding"
    start = getattr(policy, "start", None)
    try:
        count = len(signature(start).parameters) if callable(start) else 0
    except (TypeError, ValueError):
        return None
    return {1: "batching", 3: "eviction"}.get(count)
