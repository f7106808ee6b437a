"""Precision policies that each break one promise; ``Good`` breaks none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attrs import frozen

from kimicore.contracts import ModuleView, PrecisionRules


@frozen
class Good:
    """Products of the feed-forward part in 8 bits, the rest in 16."""

    name: str = "planted"

    def rules(self, modules: Sequence[ModuleView]) -> Any:
        return PrecisionRules({}, (("*.mlp.*.bias", "bfloat16"), ("*.mlp.*", "int8")), "bfloat16")


class Mutable(Good):
    """Settings that can be changed."""

    __setattr__ = object.__setattr__


@frozen
class Raises(Good):
    def rules(self, modules: Sequence[ModuleView]) -> Any:
        if len(modules) > 99:
            raise MemoryError(len(modules))
        return super().rules(modules)


@frozen
class OneShot(Good):
    """The patterns can be read once."""

    def rules(self, modules: Sequence[ModuleView]) -> Any:
        return PrecisionRules({}, iter((("*", "bfloat16"),)), None)  # type: ignore[arg-type]


@frozen
class LeavesOut(Good):
    def rules(self, modules: Sequence[ModuleView]) -> Any:
        return PrecisionRules({}, (("layers.*", "bfloat16"), ("embed*", "bfloat16")), None)


@frozen
class NamesOthers(Good):
    def rules(self, modules: Sequence[ModuleView]) -> Any:
        return PrecisionRules({"lm_head": "bfloat16"}, (), "bfloat16")


@frozen
class MadeUp(Good):
    def rules(self, modules: Sequence[ModuleView]) -> Any:
        return PrecisionRules({}, (("*.nowhere", "int3"),), "bfloat16")


@frozen
class Everywhere(Good):
    def rules(self, modules: Sequence[ModuleView]) -> Any:
        return PrecisionRules({}, (), "int4")


@frozen
class Empties(Good):
    def rules(self, modules: Sequence[ModuleView]) -> Any:
        if isinstance(modules, list):
            modules.sort(key=lambda one: one.name)
        return super().rules(modules)


@frozen
class HashOrder(Good):
    def rules(self, modules: Sequence[ModuleView]) -> Any:
        first = next(iter({one.name for one in modules}))
        return PrecisionRules({first: "float32"}, (), "bfloat16")


BAD: list[tuple[str, Callable[[], Any]]] = [
    ("settings", Mutable),
    ("never-raises", Raises),
    ("never-raises", OneShot),
    ("complete", LeavesOut),
    ("complete", NamesOthers),
    ("known", MadeUp),
    ("possible", Everywhere),
    ("unchanged", Empties),
    ("repeatable", HashOrder),
]
