"""One precision for all matrices."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from kimicore.checks import boolean_field, choice_field
from kimicore.contracts import ModuleView, PrecisionRules
from kimicore.errors import ConfigError
from kimicore.policies.precision.activations import ActivationPrecision
from kimicore.policies.precision.formats import PRECISIONS, fitting

__all__ = ["Uniform"]

FLOATS = tuple(one.name for one in PRECISIONS.values() if one.kind == "float")


@frozen
class Uniform:
    """Every module at ``weights``; where that is an integer precision, norms and biases at ``vectors``.

    Where a matrix has a number of inputs that is no multiple of the groups of ``weights``, it has the next smaller ones
    that fit, or at last ``int8``; with ``strict`` that is an error of the map. ``activations``: at all positions.
    Raises :class:`~kimicore.ConfigError`.
    """

    weights: str = choice_field("bfloat16", tuple(PRECISIONS), fault=ConfigError)
    vectors: str = choice_field("bfloat16", FLOATS, fault=ConfigError)
    activations: str = choice_field(
        "bfloat16", tuple(one.name for one in PRECISIONS.values() if one.activations), fault=ConfigError
    )
    strict: bool = boolean_field(False, fault=ConfigError)
    name: str = "uniform"

    def rules(self, modules: Sequence[ModuleView]) -> PrecisionRules:
        """Return a default, and exact names for what an integer precision does not suit."""
        exact: dict[str, str] = {}
        if PRECISIONS[self.weights].kind == "int":
            for one in modules:
                if len(one.shape) != 2 or one.kind == "norm":
                    exact[one.name] = self.vectors
                elif not self.strict and (fits := fitting(self.weights, one.shape[1])) != self.weights:
                    exact[one.name] = fits
        return PrecisionRules(exact, (), self.weights)

    def activation_precision(self) -> ActivationPrecision:
        """Return the precision of activations."""
        return ActivationPrecision(self.activations, self.activations)
