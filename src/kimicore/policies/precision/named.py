"""Maps by the short names that a command line takes, resolved against a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from kimicore.contracts import ModuleView, PrecisionRules
from kimicore.errors import ConfigError, KimiCoreError, PluginError
from kimicore.guard import RAISED
from kimicore.plugins import KINDS, resolve
from kimicore.policies.precision.activations import ActivationPrecision
from kimicore.policies.precision.formats import PRECISIONS
from kimicore.policies.precision.resolving import ResolvedMap, resolve_precision

__all__ = ["SHORT_NAMES", "map_names", "policy_named", "resolved_by", "smaller_groups"]

Answer = TypeVar("Answer")

SHORT_NAMES: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "none": ("uniform", {"weights": "bfloat16"}),
        "uniform-int4": ("uniform", {"weights": "int4"}),
        "uniform-int8": ("uniform", {"weights": "int8"}),
    }
)
"""Names that stand for a policy with settings."""


def map_names() -> tuple[str, ...]:
    """Return the names of the built-in maps, short ones included."""
    return tuple(sorted({*KINDS["precision"], *SHORT_NAMES}))


def policy_named(name: str, settings: Mapping[str, Any] | None = None) -> Any:
    """Return the precision policy of a name, short ones included, with ``settings``.

    Raises what :func:`kimicore.plugins.resolve` does, and :class:`~kimicore.ConfigError` for a setting that is not what
    a short name means.
    """
    policy, meant = SHORT_NAMES.get(name, (name, {}))
    for key, value in (settings or {}).items():
        if meant.get(key, value) != value:
            own = f"precision={name!r} means {policy!r} with {key}={meant[key]!r}"
            raise ConfigError(f"{own}, but {key}={value!r} is set; name {policy!r}")
    return resolve("precision", policy, {**meant, **(settings or {})})


def resolved_by(policy: Any, modules: Sequence[ModuleView]) -> ResolvedMap:
    """Return a policy's map of a model's modules.

    Raises :class:`~kimicore.ConfigError` for a map that cannot be, and :class:`~kimicore.PluginError` where the policy
    raises or answers with something else than its kind does.
    """
    rules = _answer(policy, "rules", PrecisionRules, modules)
    wanted = None
    if getattr(policy, "activation_precision", None) is not None:
        wanted = _answer(policy, "activation_precision", ActivationPrecision)
    try:
        return resolve_precision(rules, modules, wanted)
    except KimiCoreError:
        raise
    except Exception as error:
        raise PluginError(f"precision={policy.name!r}: {rules!r} cannot be applied: {error!r}") from error


def _answer(policy: Any, method: str, kind: type[Answer], *given: Any) -> Answer:
    try:
        answer = getattr(policy, method)(*given)
    except ConfigError:
        raise
    except RAISED as error:
        raise PluginError(f"precision={policy.name!r}: {method}() failed: {error!r}") from error
    if not isinstance(answer, kind):
        raise PluginError(f"precision={policy.name!r}: {method}() answered {answer!r}, which is no {kind.__name__}")
    return answer


def smaller_groups(policy: Any, found: ResolvedMap) -> list[str]:
    """Return what a map says of matrices that have other groups than its policy names, one line for each kind."""
    wanted = getattr(policy, "weights", None) or getattr(policy, "ffn", None)
    if not isinstance(wanted, str) or wanted not in PRECISIONS or not PRECISIONS[wanted].group:
        return []
    counts: dict[tuple[int, str], int] = {}
    for one in found.modules:
        own = PRECISIONS[one.precision]
        if own.kind == "int" and own.name != wanted and not PRECISIONS[wanted].takes(one.module.shape[1]):
            key = (one.module.shape[1], own.name)
            counts[key] = counts.get(key, 0) + 1
    group = PRECISIONS[wanted].group
    return [
        f"{count} matrices have {name}: {inputs} inputs are no multiple of {group}, the group of {wanted}"
        for (inputs, name), count in sorted(counts.items())
    ]
