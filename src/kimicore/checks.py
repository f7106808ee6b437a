"""Converters that turn what a caller gives into a field's type, or refuse it by the field's name."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from typing import Any

from attrs import Attribute, Converter, field

from kimicore.errors import KimiCoreError

__all__ = [
    "boolean_field",
    "byte_size",
    "byte_size_field",
    "choice_field",
    "float_field",
    "int_field",
    "integer",
    "name_field",
    "number",
    "path_field",
]

Fault = type[KimiCoreError]
_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGT")}
_UNITS |= {f"{p}iB": 1024 ** (i + 1) for i, p in enumerate("KMGT")}


def integer(name: str, value: Any, low: int, high: int | None, fault: Fault) -> int:
    """Return ``value`` as an int in ``[low, high]`` or raise ``fault`` with the field's name; bool is refused."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise fault(f"{name}={value!r}: must be an integer")
    result = int(value.__index__())
    if result < low or (high is not None and result > high):
        bound = f"at least {low}" if high is None else f"from {low} to {high}"
        raise fault(f"{name}={value!r}: must be {bound}")
    return result


def number(name: str, value: Any, low: float, high: float, fault: Fault, *, above: bool = False) -> float:
    """Return ``value`` as a finite float in ``[low, high]`` (``(low, high]`` when ``above``) or raise ``fault``."""
    if isinstance(value, (bool, str)) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        raise fault(f"{name}={value!r}: must be a number")
    try:
        result = float(value)
    except (OverflowError, TypeError, ValueError) as error:
        raise fault(f"{name}={str(value)[:40]}: is not a number that can be used: {error}") from error
    if not math.isfinite(result) or result > high or result < low or (above and result == low):
        raise fault(f"{name}={value!r}: must be finite, {'over' if above else 'at least'} {low} and at most {high}")
    return result


def byte_size(name: str, value: Any, fault: Fault) -> int:
    """Return a number of bytes from an int or from text such as ``"512MiB"`` or ``"2GB"``."""
    if not isinstance(value, str):
        return integer(name, value, 0, None, fault)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)\s*", value)
    if match is None or match[2] not in _UNITS:
        raise fault(f"{name}={value!r}: write a number of bytes, or text such as '512MiB' or '2GB'")
    return int(float(match[1]) * _UNITS[match[2]])


def _field(convert: Callable[[str, Any], Any], default: Any, optional: bool) -> Any:
    def run(value: Any, attribute: Attribute[Any]) -> Any:
        return None if optional and value is None else convert(attribute.name, value)

    return field(default=default, kw_only=True, converter=Converter(run, takes_field=True))


def int_field(default: int | None, low: int, high: int | None = None, *, fault: Fault, optional: bool = False) -> Any:
    """Return an attrs field that holds an integer from ``low`` to ``high`` (or None where ``optional``)."""
    return _field(lambda name, value: integer(name, value, low, high, fault), default, optional)


def float_field(
    default: float | None, low: float, high: float, *, fault: Fault, above: bool = False, optional: bool = False
) -> Any:
    """Return an attrs field that holds a finite number from ``low`` to ``high``."""
    return _field(lambda name, value: number(name, value, low, high, fault, above=above), default, optional)


def byte_size_field(*, fault: Fault) -> Any:
    """Return an attrs field that holds a number of bytes, also given as text, or None."""
    return _field(lambda name, value: byte_size(name, value, fault), None, True)


def name_field(default: str, *, fault: Fault) -> Any:
    """Return an attrs field that holds a name: a string that is not empty."""

    def convert(name: str, value: Any) -> str:
        if not isinstance(value, str) or not value:
            raise fault(f"{name}={value!r}: must be a name")
        return value

    return _field(convert, default, False)


def path_field(*, fault: Fault) -> Any:
    """Return an attrs field that holds a path as text, or None."""

    def convert(name: str, value: Any) -> str:
        try:
            path = os.fspath(value)
        except TypeError:
            path = None
        if not isinstance(path, str) or not path or "\0" in path:
            raise fault(f"{name}={value!r}: must be a path")
        return path

    return _field(convert, None, True)


def boolean_field(default: bool, *, fault: Fault) -> Any:
    """Return an attrs field that holds True or False and nothing that merely looks like them."""

    def convert(name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise fault(f"{name}={value!r}: must be True or False")
        return value

    return _field(convert, default, False)


def choice_field(default: str, choices: tuple[str, ...], *, fault: Fault) -> Any:
    """Return an attrs field that holds one of ``choices``."""

    def convert(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            raise fault(f"{name}={value!r:.80}: must be one of {', '.join(choices)}")
        return value

    return _field(convert, default, False)
