"""The default map: feed-forward matrices in 4 bits, everything else in 16."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from kimicore.checks import choice_field, int_field
from kimicore.contracts import ModuleView, PrecisionRules
from kimicore.errors import ConfigError
from kimicore.policies.precision.activations import ActivationPrecision
from kimicore.policies.precision.formats import PRECISIONS

__all__ = ["Asymmetric"]

FALLBACKS = ("int4", "int4-g64", "int4-g32", "int8")  # from the largest group to none


@frozen
class Asymmetric:
    """Feed-forward matrices at ``ffn``; attention, embedding, norms, head and all biases at ``others``.

    The feed-forward part holds most of a model's weights and bears coarse ones best. Where a matrix has a number of
    inputs that is no multiple of the groups of ``ffn``, it has the next of ``int4``, ``int4-g64``, ``int4-g32`` and
    ``int8`` that fits. Activations are at ``others`` for the first ``first_tokens`` and last ``last_tokens`` positions
    and at ``middle`` between them. Raises :class:`~kimicore.ConfigError`.
    """

    ffn: str = choice_field("int4", tuple(PRECISIONS), fault=ConfigError)
    others: str = choice_field("bfloat16", ("bfloat16", "float16", "float32"), fault=ConfigError)
    middle: str = choice_field("int8", ("int8", "bfloat16", "float16", "float32"), fault=ConfigError)
    first_tokens: int = int_field(16, 0, 1 << 20, fault=ConfigError)
    last_tokens: int = int_field(16, 1, 1 << 20, fault=ConfigError)
    name: str = "asymmetric"

    def rules(self, modules: Sequence[ModuleView]) -> PrecisionRules:
        """Return exact names for the feed-forward matrices, and a default for the rest."""
        exact = {one.name: self._fitting(one.shape[1]) for one in modules if one.kind == "ffn" and len(one.shape) == 2}
        return PrecisionRules(exact, (), self.others)

    def activation_precision(self) -> ActivationPrecision:
        """Return the precision of activations."""
        return ActivationPrecision(
            self.others, self.middle, first_tokens=self.first_tokens, last_tokens=self.last_tokens
        )

    def _fitting(self, inputs: int) -> str:
        wanted = PRECISIONS[self.ffn]
        if wanted.takes(inputs):
            return self.ffn
        smaller = [PRECISIONS[name] for name in FALLBACKS]
        return next(one.name for one in smaller if one.takes(inputs) and (not one.group or one.group < wanted.group))
