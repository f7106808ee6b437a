"""A map whose rules are settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import Factory, field, frozen

from kimicore.contracts import ModuleView, PrecisionRules
from kimicore.errors import ConfigError
from kimicore.policies.precision.activations import ActivationPrecision
from kimicore.policies.precision.formats import PRECISIONS

__all__ = ["Custom"]


def _precision(where: str, value: Any) -> str:
    if not isinstance(value, str) or value not in PRECISIONS:
        raise ConfigError(f"{where}={value!r}: is no known precision; known are {', '.join(PRECISIONS)}")
    return value


def _exact(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"exact={value!r}: must map names of modules to precisions")
    return {name: _precision(f"exact[{name!r}]", one) for name, one in value.items()}


def _patterns(value: Any) -> tuple[tuple[str, str], ...]:
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, Sequence) or isinstance(pairs, (str, bytes)):
        raise ConfigError(f"patterns={value!r}: must be pairs of a pattern and a precision, in the order of their rank")
    found = []
    for pair in pairs:
        if isinstance(pair, (str, bytes)) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise ConfigError(f"patterns: {pair!r} is no pair of a pattern and a precision")
        pattern, precision = pair
        if not isinstance(pattern, str) or not pattern:
            raise ConfigError(f"patterns: {pattern!r} is no pattern; write one such as '*.mlp.*'")
        found.append((pattern, _precision(f"patterns[{pattern!r}]", precision)))
    return tuple(found)


def _default(value: Any) -> str | None:
    return None if value is None else _precision("default", value)


def _activations(value: Any) -> ActivationPrecision:
    if isinstance(value, ActivationPrecision):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"activations={value!r}: must map ends, middle, first_tokens, last_tokens to their values")
    try:
        return ActivationPrecision(**value)
    except TypeError as error:
        raise ConfigError(f"activations: {error}; fields are ends, middle, first_tokens, last_tokens") from error


@frozen
class Custom:
    """``exact`` names first, then the first of ``patterns`` that matches, then ``default`` (None: that is an error).

    ``patterns``: pairs such as ``("layers.*.mlp.*", "int4")``, or a mapping in the order of rank; ``*`` also matches
    dots. ``activations``: fields of :class:`~kimicore.policies.precision.ActivationPrecision`.
    Raises :class:`~kimicore.ConfigError`.
    """

    exact: Mapping[str, str] = field(default=Factory(dict), converter=_exact)
    patterns: tuple[tuple[str, str], ...] = field(default=(), converter=_patterns)
    default: str | None = field(default="bfloat16", converter=_default)
    activations: ActivationPrecision = field(default=Factory(ActivationPrecision), converter=_activations)
    name: str = "custom"

    def rules(self, modules: Sequence[ModuleView]) -> PrecisionRules:
        """Return the rules as they were given."""
        return PrecisionRules(self.exact, self.patterns, self.default)

    def activation_precision(self) -> ActivationPrecision:
        """Return the precision of activations."""
        return self.activations
