"""How fast prompts are read: an estimate from the measured cost of steps."""

from __future__ import annotations

from attrs import frozen

from kimicore.contracts import StepCost, StepView

__all__ = ["FLOOR_TOKENS", "STRETCH", "Pace"]

# How the planner sizes chunks beside streams that generate:
STRETCH = 1.9  # a step beside prompts may take this many times what its generating rows take alone
FLOOR_TOKENS = 11  # prompts get at least so many tokens a step, however slow steps are


@frozen
class Pace:
    """``chunk_tokens`` of prompts fit into a step now, and a prompt takes ``token_s`` seconds per token of it."""

    chunk_tokens: int
    token_s: float

    @classmethod
    def of(cls, view: StepView, cost: StepCost) -> Pace:
        """Return the pace of a prompt that would have the next steps to itself, beside the rows that generate."""
        limits = view.limits
        rows = context = 0
        streamed = False
        for row in view.running:
            if row.known_tokens - row.computed_tokens == 1:
                rows += 1
                context += row.known_tokens
                streamed = streamed or (row.streamed and row.generated_tokens > 0)
        most = max(1, limits.max_batch_tokens - rows)
        full_s = cost.step_s(rows + most, rows + 1, context + most, most * most // 2)
        if not streamed:
            return cls(most, full_s / most)
        alone_s = cost.step_s(rows, rows, context)
        allowed_s = max(limits.target_step_s, STRETCH * alone_s)
        if full_s <= allowed_s:
            return cls(most, full_s / most)
        slope_s = (full_s - alone_s) / most
        chunk = min(most, max(FLOOR_TOKENS, int((allowed_s - alone_s) / slope_s))) if slope_s > 0.0 else most
        return cls(chunk, (alone_s + chunk * slope_s) / chunk)
