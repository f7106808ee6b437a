"""Tensors in, tokens out: a bound step is packed, run through the model, and sampled."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kimicore.kernels.registry import Ops
from kimicore.kv.arena import Arena
from kimicore.model.batch import Batch, Measured
from kimicore.model.importance import MEASURED_QUERIES, relative_importance
from kimicore.model.logprobs import score_prompt
from kimicore.model.sampling import sample
from kimicore.model.transformer import Transformer
from kimicore.sampling_params import SamplingParams
from kimicore.types import BoundRow, BoundStep, RowPlan, RowResult, Shape, StepResult, TokenScores

__all__ = ["ModelRunner", "pack"]

HEAD_BYTES = 16 << 20
"""Logits are made in pieces of about this many bytes, so that scoring a long prompt needs little memory."""


class ModelRunner:
    """Runs a model on its device, one step at a time, on whatever thread calls it."""

    def __init__(self, model: Transformer, arena: Arena, ops: Ops, block_tokens: int) -> None:
        self._model, self._arena, self._ops = model, arena, ops
        self._block_tokens = block_tokens
        self._dynamic = any(rope.kind == "dynamic" for rope in model.spec.ropes)
        self._head_rows = max(1, HEAD_BYTES // (4 * model.spec.vocab_size))

    def run(self, step: BoundStep) -> StepResult:
        """Compute the step: keys and values into the arena, a token for each row that samples one.

        A row whose logits are not finite has its error in its own result; an exception means the step failed.
        """
        begun = time.perf_counter()
        with torch.inference_mode():
            batch = pack(step, self._block_tokens, dynamic=self._dynamic)
            importance, mass = None, []
            if batch.measured is not None:
                mass = [torch.zeros(table.shape) for table in batch.measured.block_tables]
            hidden = self._model.forward(batch, self._arena.views, mass)
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
        """Return for each row None or what its blocks get, per KV class; see :class:`kimicore.types.StepResult`."""
        found: list[Any] = [None] * len(step.rows)
        shares = [one.numpy() for one in mass]
        for at, index in enumerate(step.measured):
            plan = step.rows[index].plan
            queries, context = min(plan.count, MEASURED_QUERIES), plan.start + plan.count
            found[index] = tuple(
                [
                    relative_importance(own[at], queries, context, one.window, self._block_tokens)
                    for own, one in zip(shares, self._arena.classes, strict=True)
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


def wanted(row: BoundRow) -> int:
    """Return how many of the row's last positions need logits."""
    if row.plan.logits_at == "all":
        return row.plan.count
    return 1 if row.sample else 0


def pack(step: BoundStep, block_tokens: int, *, dynamic: bool) -> Batch:
    """Return the step's rows as one packed batch, padded with dummy tokens to the step's shape.

    Dummy tokens write to slot 0, which belongs to no request, and no row reads them.
    """
    rows = step.rows
    counts = np.fromiter((row.plan.count for row in rows), np.int64, len(rows))
    starts = np.fromiter((row.plan.start for row in rows), np.int64, len(rows))
    ends = np.cumsum(counts)
    real = int(ends[-1])
    total = max(real, step.shape.tokens)
    token_ids = np.zeros(total, np.int64)
    begins = ends - counts
    for row, begin, end in zip(rows, begins.tolist(), ends.tolist(), strict=True):
        token_ids[begin:end] = row.known[row.plan.start : row.plan.start + row.plan.count]
    of_row = np.repeat(np.arange(len(rows)), counts)
    within = np.arange(real) - begins[of_row]
    positions = np.zeros(total, np.int64)
    positions[:real] = starts[of_row] + within
    tables, slots = _tables(step, of_row, positions[:real], block_tokens, total)
    selected = [
        end - n + i for row, end in zip(rows, ends.tolist(), strict=True) for n in (wanted(row),) for i in range(n)
    ]
    rope_tokens = None
    if dynamic:
        lengths = np.zeros(total, np.int64)
        lengths[:real] = np.fromiter((row.rope_tokens for row in rows), np.int64, len(rows))[of_row]
        rope_tokens = torch.from_numpy(lengths)
    row_starts = np.zeros(len(rows) + 1, np.int32)
    row_starts[1:] = ends
    return Batch(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions),
        row_starts=torch.from_numpy(row_starts),
        contexts=torch.from_numpy((starts + counts).astype(np.int32)),
        block_tables=tuple(torch.from_numpy(table) for table in tables),
        slots=tuple(torch.from_numpy(one) for one in slots),
        rope_tokens=rope_tokens,
        selected=torch.tensor(selected, dtype=torch.int64),
        measured=_measured(step.measured, counts, ends, starts + counts, tables) if step.measured else None,
    )


def _measured(
    rows: Sequence[int],
    counts: NDArray[np.int64],
    ends: NDArray[np.int64],
    contexts: NDArray[np.int64],
    tables: Sequence[NDArray[np.int32]],
) -> Measured:
    """Return the last queries of these rows."""
    chosen = np.asarray(rows, np.int64)
    few = np.minimum(counts[chosen], MEASURED_QUERIES)
    row_starts = np.zeros(len(chosen) + 1, np.int32)
    row_starts[1:] = np.cumsum(few)
    tokens = np.repeat(ends[chosen] - row_starts[1:], few) + np.arange(row_starts[-1])
    return Measured(
        tokens=torch.from_numpy(tokens),
        row_starts=torch.from_numpy(row_starts),
        contexts=torch.from_numpy(contexts[chosen].astype(np.int32)),
        block_tables=tuple(torch.from_numpy(table[chosen]) for table in tables),
    )


def _tables(
    step: BoundStep, of_row: NDArray[np.int64], positions: NDArray[np.int64], block_tokens: int, total: int
) -> tuple[list[NDArray[np.int32]], list[NDArray[np.int64]]]:
    """Return per KV class the block tables [B, N] and the place that each token is written to [T]."""
    tables: list[NDArray[np.int32]] = []
    slots: list[NDArray[np.int64]] = []
    for index in range(len(step.rows[0].tables)):
        width = max(step.shape.blocks, max(len(row.tables[index]) for row in step.rows))
        table = np.zeros((len(step.rows), width), np.int32)
        for line, row in zip(table, step.rows, strict=True):
            line[: len(row.tables[index])] = row.tables[index]
        places = np.zeros(total, np.int64)
        block = table[of_row, positions // block_tokens].astype(np.int64)
        places[: len(positions)] = block * block_tokens + positions % block_tokens
        tables.append(table)
        slots.append(places)
    return tables, slots
