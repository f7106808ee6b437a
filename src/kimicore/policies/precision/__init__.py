"""Precision maps: which module keeps which precision."""

from kimicore.policies.precision.activations import ActivationPrecision
from kimicore.policies.precision.formats import PRECISIONS, NumberFormat
from kimicore.policies.precision.resolving import ResolvedMap, ResolvedModule, resolve_precision

__all__ = [
    "PRECISIONS",
    "ActivationPrecision",
    "NumberFormat",
    "ResolvedMap",
    "ResolvedModule",
    "resolve_precision",
]
