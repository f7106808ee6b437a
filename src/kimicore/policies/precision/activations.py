"""The precision of activations, by position in a sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeVar

from attrs import frozen

from kimicore.checks import int_field
from kimicore.errors import ConfigError
from kimicore.policies.precision.formats import PRECISIONS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["ActivationPrecision"]

Tokens = TypeVar("Tokens", int, "NDArray[np.int64]")


@frozen
class ActivationPrecision:
    """Activations at ``ends`` for the first and last positions of a prompt and at ``middle`` between them.

    The first ``first_tokens`` positions are those that all later ones attend to most; the last ``last_tokens`` are what
    the next token depends on, and every generated token counts as one of them. Raises :class:`~kimicore.ConfigError`.
    """

    ends: str = "bfloat16"
    middle: str = "bfloat16"
    first_tokens: int = int_field(16, 0, 1 << 20, fault=ConfigError)
    last_tokens: int = int_field(16, 1, 1 << 20, fault=ConfigError)

    def __attrs_post_init__(self) -> None:
        for name, value in (("ends", self.ends), ("middle", self.middle)):
            known = PRECISIONS.get(value) if isinstance(value, str) else None
            if known is None or not known.activations:
                usable = ", ".join(one.name for one in PRECISIONS.values() if one.activations)
                raise ConfigError(f"activations: {name}={value!r}: must be one of {usable}")

    def span(self, prompt_tokens: Tokens) -> tuple[int, Tokens]:
        """Return the first position of a prompt's middle and the one behind its last; none where they cross.

        ``prompt_tokens``: of one prompt, or of many as an array, whose middles then end each at its own place.
        """
        return self.first_tokens, prompt_tokens - self.last_tokens

    def place(self, position: int, prompt_tokens: int) -> Literal["first", "middle", "last"]:
        """Return the activation class of a position (from 0) of a sequence with a prompt of so many tokens."""
        first, stop = self.span(prompt_tokens)
        if position < first:
            return "first"
        return "last" if position >= stop else "middle"

    def at(self, position: int, prompt_tokens: int) -> str:
        """Return the precision of a position."""
        return self.middle if self.place(position, prompt_tokens) == "middle" else self.ends
