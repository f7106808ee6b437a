"""Quantizing a model: rounding its weights with an eye on what goes through them, and writing the result.

.. code-block:: python

    from kimicore.quantize import QuantizeSettings, precision_map, quantize_model

    found = precision_map("smollm2-135m-instruct", "asymmetric", {"ffn": "int8"})
    quantize_model("smollm2-135m-instruct", "smollm2-int8", found, QuantizeSettings(method="nearest"))

Importing the package is light: what computes is imported when one of its names is used.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kimicore.quantize.calibration import calibration_texts
    from kimicore.quantize.judge import Judge
    from kimicore.quantize.ladder import LEAST_SHARE, Climbed, Rung, climb
    from kimicore.quantize.maps import precision_map
    from kimicore.quantize.methods import METHODS, Method, QuantizeSettings
    from kimicore.quantize.run import Quantized, quantize_model

__all__ = [
    "LEAST_SHARE",
    "METHODS",
    "Climbed",
    "Judge",
    "Method",
    "QuantizeSettings",
    "Quantized",
    "Rung",
    "calibration_texts",
    "climb",
    "precision_map",
    "quantize_model",
]

_MODULES: Final = MappingProxyType(
    {
        "LEAST_SHARE": "ladder",
        "METHODS": "methods",
        "Climbed": "ladder",
        "Judge": "judge",
        "Method": "methods",
        "QuantizeSettings": "methods",
        "Quantized": "run",
        "Rung": "ladder",
        "calibration_texts": "calibration",
        "climb": "ladder",
        "precision_map": "maps",
        "quantize_model": "run",
    }
)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
