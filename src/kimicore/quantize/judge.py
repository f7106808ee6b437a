"""The judge of a ladder: quantized folders compared with the model that they were made from."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from kimicore.verify.opened import ModelChoice
from kimicore.verify.report import Report, library_versions, machine
from kimicore.verify.scorer import Scorer

__all__ = ["Judge"]

_TOKENS = 64


class Judge:
    """Compares folders with ``baseline`` as ``kimicore verify`` does; a context manager.

    The baseline's continuations and what bfloat16 makes of them are computed once. Raises what
    :class:`~kimicore.verify.scorer.Scorer` does.
    """

    def __init__(
        self,
        baseline: str | os.PathLike[str],
        *,
        prompts: int = 100,
        new_tokens: int = _TOKENS,
        threads: int | None = None,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self._scorer = Scorer(
            baseline, prompts=prompts, new_tokens=new_tokens, text_tokens=0, threads=threads, progress=progress
        )
        self._noise = self._scorer.noise(edit=False)

    def __call__(self, folder: Path) -> Report:
        """Return the report on a folder's weights as they lie there, computed in float32."""
        scores, compared = self._scorer.score_model(ModelChoice(folder), edit=False, texts=False)
        baseline, digest, tokens = self._scorer.baseline_record(), self._scorer.corpus.digest, self._scorer.new_tokens
        told = library_versions(), machine()
        return Report(baseline, compared, scores, self._noise, "agreement", tokens, self._scorer.seed, digest, *told)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._scorer.close()
