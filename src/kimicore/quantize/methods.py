"""The ways to round a model's matrices, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from attrs import field, frozen

from kimicore.checks import boolean_field, float_field, int_field
from kimicore.errors import ConfigError

__all__ = ["METHODS", "Method", "QuantizeSettings"]


@frozen
class Method:
    """A way to round: whether input channels are scaled before, and how codes are found."""

    name: str
    scaling: bool
    rounding: Literal["nearest", "searched", "compensated"]

    @property
    def calibrated(self) -> bool:
        """Whether it looks at inputs."""
        return self.scaling or self.rounding != "nearest"


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        one.name: one
        for one in (
            Method("nearest", False, "nearest"),
            Method("awq", True, "searched"),
            Method("gptq", False, "compensated"),
            Method("awq-gptq", True, "compensated"),
        )
    }
)


def _method(value: str | Method) -> Method:
    if isinstance(value, Method):
        return value
    if not isinstance(value, str) or value not in METHODS:
        raise ConfigError(f"method={value!r}: must be one of {', '.join(METHODS)}")
    return METHODS[value]


@frozen
class QuantizeSettings:
    """How a model is quantized.

    ``method``: one of :data:`METHODS`. ``samples`` sequences of ``sample_tokens`` tokens each are what it is calibrated
    on. ``damping``: share of the mean diagonal that steadies error compensation; ``act_order``: round the columns of
    the largest inputs first. Raises :class:`~kimicore.ConfigError`.
    """

    method: Method = field(default=METHODS["gptq"], converter=_method)
    samples: int = int_field(64, 1, 1 << 16, fault=ConfigError)
    sample_tokens: int = int_field(256, 16, 1 << 16, fault=ConfigError)
    damping: float = float_field(0.01, 0.0, 1.0, fault=ConfigError, above=True)
    act_order: bool = boolean_field(True, fault=ConfigError)
