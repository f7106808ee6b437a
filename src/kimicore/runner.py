"""Tensors in, tokens out: a bound step is packed, run through the model, and sampled."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from kimicore.kernels.registry import Ops
from kimicore.kv.arena import Arena
from kimicore.model.importance import MEASURED_QUERIES, relative_importance
from kimicore.model.logprobs import score_prompt
from kimicore.model.packing import Packer, wanted
from kimicore.model.sampling import sample
from kimicore.model.transformer import Transformer
from kimicore.sampling_params import SamplingParams
from kimicore.types import BoundRow, BoundStep, RowPlan, RowResult, Shape, StepResult, TokenScores

__all__ = ["ModelRunner"]

HEAD_BYTES = 16 << 20
"""Logits are made in pieces of about this many bytes, so that scoring a long prompt needs little memory."""


class ModelRunner:
    """Runs a model on its device, one step at a time, on whatever thread calls it."""

    def __init__(self, model: Transformer, arena: Arena, ops: Ops, block_tokens: int) -> None:
        self._model, self._arena, self._ops = model, arena, ops
        self._block_tokens = block_tokens
        dynamic = any(rope.kind == "dynamic" for rope in model.spec.ropes)
        self._packer = Packer(arena.classes, block_tokens, dynamic=dynamic, activations=model.activations)
        self._groups = [one for one in arena.classes if one.precision == "full"]
        self._head_rows = max(1, HEAD_BYTES // (4 * model.spec.vocab_size))

    @property
    def model(self) -> Transformer:
        """The model that runs; there is none once the runner is closed."""
        return self._model

    def run(self, step: BoundStep) -> StepResult:
        """Compute the step: keys and values into the arena, a token for each row that samples one.

        A row whose logits are not finite has its error in its own result; an exception means the step failed.
        """
        order = self._packer.order(step.rows)
        if order is not None:
            return _in_order(self.run(_ordered(step, order)), order)
        begun = time.perf_counter()
        with torch.inference_mode():
            batch = self._packer.pack(step)
            importance, mass = None, []
            if batch.measured is not None:
                mass = [torch.zeros(table.shape) for table in batch.measured.block_tables]
            hidden = self._model.forward(batch, self._arena.views, mass, self._arena.summaries)
            rows = self._results(step.rows, hidden)
            if batch.measured is not None:
                importance = self._importance(step, mass)
        return StepResult(rows, importance, time.perf_counter() - begun)

    def warm_up(self, tokens: int) -> list[tuple[float, BoundRow]]:
        """Run a prompt of ``tokens`` tokens and a single token on nobody's behalf, so that the first request need not
        pay for what torch and the kernels set up on first use; everything is written to slot 0.

        Then run them once more, and return what each took in seconds: a first notion of how fast this machine is.
        """
        taken: list[tuple[float, BoundRow]] = []
        for count in (tokens, 1, tokens, 1):
            known = [0] * count
            table = [0] * -(-count // self._block_tokens)
            plan = RowPlan(0, 0, count, logits_at="last")
            tables = tuple(table for _ in self._arena.classes)
            row = BoundRow(plan, known, count, tables, True, SamplingParams(seed=0), 0, 0, (), count)
            taken.append((self.run(BoundStep(0, (row,), Shape(count, 1, len(table)))).step_s, row))
        return taken[2:]

    def close(self) -> None:
        """Let go of weights and arena; may be called twice."""
        self.__dict__.pop("_model", None)
        self.__dict__.pop("_arena", None)

    def _importance(self, step: BoundStep, mass: Sequence[Tensor]) -> tuple[Any, ...]:
        """Return for each row None or what its blocks get, per group of layers."""
        found: list[Any] = [None] * len(step.rows)
        shares = [one.numpy() for one in mass]
        for at, index in enumerate(step.measured):
            plan = step.rows[index].plan
            queries, context = min(plan.count, MEASURED_QUERIES), plan.start + plan.count
            found[index] = tuple(
                [
                    relative_importance(own[at], queries, context, one.window, self._block_tokens)
                    for own, one in zip(shares, self._groups, strict=True)
                ]
            )
        return tuple(found)

    # ------------------------------------------------------------ from hidden states to results

    def _results(self, rows: Sequence[BoundRow], hidden: Tensor) -> tuple[RowResult, ...]:
        """Sample and score; ``hidden`` holds the wanted positions of all rows, in order."""
        results = [RowResult()] * len(rows)
        sampled: list[int] = []
        places: list[int] = []
        start = 0
        for index, row in enumerate(rows):
            count = wanted(row)
            if row.plan.logits_at == "all":
                results[index] = RowResult(prompt_scores=self._score(row, hidden[start : start + count]))
            if row.sample:
                sampled.append(index)
                places.append(start + count - 1)
            start += count
        for first in range(0, len(sampled), self._head_rows):
            piece = sampled[first : first + self._head_rows]
            logits = self._model.logits(hidden[places[first : first + self._head_rows]])
            for index, result in zip(piece, sample(logits, [rows[i] for i in piece], self._ops), strict=True):
                scores = results[index].prompt_scores
                results[index] = RowResult(result.tokens, result.logprobs, scores, result.error)
        return tuple(results)

    def _score(self, row: BoundRow, hidden: Tensor) -> tuple[TokenScores, ...]:
        """Score the prompt's tokens behind each position of the chunk."""
        first = row.plan.start + 1
        following = row.known[first : min(first + row.plan.count, row.prompt_tokens)]
        scores: list[TokenScores] = []
        for begin in range(0, len(following), self._head_rows):
            piece = following[begin : begin + self._head_rows]
            logits = self._model.logits(hidden[begin : begin + len(piece)])
            scores.extend(score_prompt(logits, piece, row.params.prompt_logprobs or 0, position=first + begin))
        return tuple(scores)


def _ordered(step: BoundStep, order: Sequence[int]) -> BoundStep:
    """Return the step with its rows in this order."""
    place = {index: at for at, index in enumerate(order)}
    measured = tuple(sorted([place[index] for index in step.measured]))
    return evolve(step, rows=tuple([step.rows[index] for index in order]), measured=measured)


def _in_order(result: StepResult, order: Sequence[int]) -> StepResult:
    """Return the result of such a step with its rows as they were."""
    back = sorted(range(len(order)), key=order.__getitem__)
    importance = result.importance
    if importance is not None:
        importance = tuple([importance[at] for at in back])
    return evolve(result, rows=tuple([result.rows[at] for at in back]), importance=importance)
