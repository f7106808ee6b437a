"""How much a running policy remembers."""

from __future__ import annotations

import gc
import sys
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

__all__ = ["Footprint", "footprint"]

_SHARED = (type, ModuleType, FunctionType, BuiltinFunctionType, CodeType)


class Footprint:
    """What can be reached from a state: ``bytes_total``, and the distinct ``keys`` among it."""

    def __init__(self, bytes_total: int, keys: frozenset[bytes]) -> None:
        self.bytes_total = bytes_total
        self.keys = keys


def footprint(state: Any) -> Footprint:
    """Return the size of everything that ``state`` alone refers to; classes, modules and functions are left out."""
    seen = {id(state)}
    pending = [state]
    total = 0
    keys: set[bytes] = set()
    while pending:
        one = pending.pop()
        total += sys.getsizeof(one)
        if isinstance(one, bytes):
            keys.add(bytes(one))
            continue
        below = [one.__self__] if isinstance(one, MethodType) else gc.get_referents(one)
        for other in below:
            if id(other) not in seen and not isinstance(other, _SHARED):
                seen.add(id(other))
                pending.append(other)
    return Footprint(total, frozenset(keys))
