"""From rules to one precision per module, and the record of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from hashlib import blake2b
from typing import Any, Self

from attrs import asdict, frozen

from kimicore.contracts import ModuleView, PrecisionRules
from kimicore.errors import ConfigError
from kimicore.policies.precision.activations import ActivationPrecision
from kimicore.policies.precision.formats import PRECISIONS

__all__ = ["ResolvedMap", "ResolvedModule", "resolve_precision"]

MOST_FAULTS = 20  # that an error lists
_VERSION = 1


@frozen
class ResolvedModule:
    """A module's precision, and the rule that gave it: "exact", a pattern, or "default"."""

    module: ModuleView
    precision: str
    rule: str

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weight, scales included."""
        return PRECISIONS[self.precision].weight_bytes(self.module.shape)


@frozen
class ResolvedMap:
    """Every module's precision, in the model's order, and that of activations."""

    modules: tuple[ResolvedModule, ...]
    activations: ActivationPrecision = ActivationPrecision()

    def precision(self, name: str) -> str:
        """Return the precision of a module; a name that the model has not is a KeyError."""
        for one in self.modules:
            if one.module.name == name:
                return one.precision
        raise KeyError(name)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, scales included."""
        return sum(one.weight_bytes for one in self.modules)

    @property
    def fingerprint(self) -> bytes:
        """16 bytes that are equal exactly where names, shapes, precisions and activations are; for keys of blocks."""
        what = [[one.module.name, one.module.kind, list(one.module.shape), one.precision] for one in self.modules]
        text = json.dumps([_VERSION, sorted(what), asdict(self.activations)], sort_keys=True, ensure_ascii=True)
        return blake2b(text.encode(), digest_size=16, person=b"kimicore-precis").digest()

    def to_json(self) -> str:
        """Return the map as JSON, for :meth:`from_json`."""
        modules = [
            {"name": one.module.name, "kind": one.module.kind, "shape": list(one.module.shape)}
            | {"precision": one.precision, "rule": one.rule}
            for one in self.modules
        ]
        found = {"version": _VERSION, "activations": asdict(self.activations), "modules": modules}
        return json.dumps(found, ensure_ascii=False, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the map that :meth:`to_json` wrote; raises :class:`~kimicore.ConfigError` for anything else."""
        try:
            found = json.loads(text)
            if found["version"] != _VERSION:
                raise ConfigError(f"precision map of version {found['version']!r}: this package reads {_VERSION}")
            modules = tuple(
                ResolvedModule(
                    ModuleView(str(one["name"]), str(one["kind"]), tuple(int(size) for size in one["shape"])),
                    str(one["precision"]),
                    str(one["rule"]),
                )
                for one in found["modules"]
            )
            activations = ActivationPrecision(**found["activations"])
        except ConfigError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"this is no precision map: {error!r}; write one with ResolvedMap.to_json()") from error
        _refuse([*_twice([one.module for one in modules]), *_impossible(modules)])
        return cls(modules, activations)

    def table(self) -> str:
        """Return the map as text: a line per module, then counts and bytes per precision, columns aligned."""
        rows = [("module", "kind", "shape", "precision", "bytes", "rule")]
        rows += [
            (
                one.module.name,
                one.module.kind,
                " x ".join(map(str, one.module.shape)),
                one.precision,
                f"{one.weight_bytes:,}",
                one.rule,
            )
            for one in self.modules
        ]
        counts = Counter(one.precision for one in self.modules)
        sizes: Counter[str] = Counter()
        for one in self.modules:
            sizes[one.precision] += one.weight_bytes
        total = max(1, self.weight_bytes)
        sums = [("precision", "modules", "bytes", "share")]
        sums += [
            (name, f"{counts[name]:,}", f"{sizes[name]:,}", f"{100 * sizes[name] / total:.1f} %")
            for name in PRECISIONS
            if counts[name]
        ]
        sums.append(("all", f"{len(self.modules):,}", f"{self.weight_bytes:,}", "100.0 %"))
        own = self.activations
        acts = f"activations: {own.middle}"
        if own.ends != own.middle:
            acts += f", {own.ends} at the first {own.first_tokens} and the last {own.last_tokens} positions of a prompt"
        return "\n\n".join([_aligned(rows, {4}), _aligned(sums, {1, 2, 3}), acts])

    def __str__(self) -> str:
        """Return :meth:`table`."""
        return self.table()


def resolve_precision(
    rules: PrecisionRules, modules: Sequence[ModuleView], activations: ActivationPrecision | None = None
) -> ResolvedMap:
    """Return one precision for every module: by its exact name, else the first pattern that matches, else the default.

    Raises :class:`~kimicore.ConfigError` that lists all faults at once, each with its module: one that no rule matches,
    a precision that is not known, one that the module cannot have (see :meth:`NumberFormat.fault`), an exact name that
    no module has, and two modules of one name.
    """
    faults = _unusable(rules, modules) + _twice(modules)
    resolved: list[ResolvedModule] = []
    for module in modules:
        precision, rule = _rule_for(module.name, rules)
        if precision is None:
            faults.append(f"{module.name}: no rule matches it; add a pattern such as '*', or a default")
        elif isinstance(precision, str) and precision in PRECISIONS:
            resolved.append(ResolvedModule(module, precision, rule))
        else:
            faults.append(f"{module.name}: precision {precision!r} is not known; known are {', '.join(PRECISIONS)}")
    _refuse(faults + _impossible(resolved))
    return ResolvedMap(tuple(resolved), ActivationPrecision() if activations is None else activations)


def _rule_for(name: str, rules: PrecisionRules) -> tuple[Any, str]:
    if name in rules.exact:
        return rules.exact[name], "exact"
    for pattern, precision in rules.patterns:
        if fnmatchcase(name, pattern):
            return precision, pattern
    return rules.default, "default"


def _unusable(rules: PrecisionRules, modules: Sequence[ModuleView]) -> list[str]:
    """Return what is wrong with rules whatever matches them."""
    names = {module.name for module in modules}
    faults = [
        f"{name}: the model has no module of this name; use a pattern where it may be absent"
        for name in rules.exact
        if name not in names
    ]
    used: Mapping[str, Any] = dict(rules.patterns)
    for pattern, precision in used.items():
        if precision not in PRECISIONS and not any(_rule_for(name, rules)[1] == pattern for name in names):
            faults.append(f"{pattern}: precision {precision!r} is not known; known are {', '.join(PRECISIONS)}")
    return faults


def _twice(modules: Sequence[ModuleView]) -> list[str]:
    counts = Counter(module.name for module in modules)
    return [f"{name}: named {count} times; names of modules must differ" for name, count in counts.items() if count > 1]


def _impossible(modules: Sequence[ResolvedModule]) -> list[str]:
    faults = []
    for one in modules:
        own = PRECISIONS.get(one.precision)
        if own is None:
            faults.append(
                f"{one.module.name}: precision {one.precision!r} is not known; known are {', '.join(PRECISIONS)}"
            )
        elif not one.module.shape or min(one.module.shape) < 1:
            faults.append(f"{one.module.name}: shape {one.module.shape} is no weight's")
        elif fault := own.fault(one.module):
            faults.append(f"{one.module.name}: {fault}")
    return faults


def _refuse(faults: Sequence[str]) -> None:
    if faults:
        more = f"\n  and {len(faults) - MOST_FAULTS} more" if len(faults) > MOST_FAULTS else ""
        listed = "".join(f"\n  {fault}" for fault in faults[:MOST_FAULTS])
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        raise ConfigError(f"the precision map has {count}:{listed}{more}")


def _aligned(rows: Sequence[Sequence[str]], right: set[int]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join(lines)
