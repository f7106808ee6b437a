"""The default map: feed-forward matrices in 4 bits, everything else in 16."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from kimicore.checks import boolean_field, choice_field, int_field
from kimicore.contracts import ModuleView, PrecisionRules
from kimicore.errors import ConfigError
from kimicore.policies.precision.activations import ActivationPrecision
from kimicore.policies.precision.formats import PRECISIONS, fitting

__all__ = ["Asymmetric"]


@frozen
class Asymmetric:
    """Feed-forward matrices at ``ffn``; attention, embedding, norms, head and all biases at ``others``.

    The feed-forward part holds most of a model's weights and bears coarse ones best. Where a matrix has a number of
    inputs that is no multiple of the groups of ``ffn``, it has the next of ``int4``, ``int4-g64``, ``int4-g32`` and
    ``int8`` that fits; with ``strict`` that is an error of the map. Activations are at ``others`` for the first
    ``first_tokens`` and last ``last_tokens`` positions and at ``middle`` between them.
    Raises :class:`~kimicore.ConfigError`.
    """

    ffn: str = choice_field("int4", tuple(PRECISIONS), fault=ConfigError)
    others: str = choice_field("bfloat16", ("bfloat16", "float16", "float32"), fault=ConfigError)
    middle: str = choice_field("int8", ("int8", "bfloat16", "float16", "float32"), fault=ConfigError)
    first_tokens: int = int_field(16, 0, 1 << 20, fault=ConfigError)
    last_tokens: int = int_field(16, 1, 1 << 20, fault=ConfigError)
    strict: bool = boolean_field(False, fault=ConfigError)
    name: str = "asymmetric"

    def rules(self, modules: Sequence[ModuleView]) -> PrecisionRules:
        """Return exact names for the feed-forward matrices, and a default for the rest."""
        matrices = [one for one in modules if one.kind == "ffn" and len(one.shape) == 2]
        exact = {one.name: self.ffn if self.strict else fitting(self.ffn, one.shape[1]) for one in matrices}
        return PrecisionRules(exact, (), self.others)

    def activation_precision(self) -> ActivationPrecision:
        """Return the precision of activations."""
        return ActivationPrecision(
            self.others, self.middle, first_tokens=self.first_tokens, last_tokens=self.last_tokens
        )
