"""Candidates scored against one baseline, whose continuations and hidden states are computed once."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import compress
from types import TracebackType
from typing import Self

import numpy as np
from attrs import evolve
from torch import Tensor

from kimicore.checks import integer
from kimicore.errors import ConfigError
from kimicore.model.transformer import Transformer
from kimicore.verify.forcing import ForcedText, Forcing, batches_of
from kimicore.verify.opened import ModelChoice, OpenedModel, check_same_vocabulary, using_threads
from kimicore.verify.prompts import Corpus, built_in, from_files
from kimicore.verify.report import ComparedModel
from kimicore.verify.tally import (
    Compared,
    Floats,
    Measured,
    Scores,
    compare,
    estimate,
    losses,
    perplexity,
    similarity,
)

__all__ = ["Scorer"]

KEPT_BYTES = 1 << 30
"""The baseline's hidden states are kept up to this many bytes; those beyond are computed again for each candidate."""
WINDOW_TOKENS = 256
Progress = Callable[[str, int, int], None]


class Scorer:
    """Scores candidates against ``baseline`` in float32, one after another; a context manager.

    ``prompts``: how many, evenly from the categories. ``new_tokens``: length of the continuations. ``prompt_tokens``:
    longer prompts are cut to so many. ``texts``: files of own texts instead of the built-in ones. ``text_tokens``: of
    each category's text that perplexity is measured on; 0: not measured. ``threads``: torch's, None: as they are.
    ``progress(what, done, total)`` is called as it goes. ``seed``: of the bootstrap.

    Making one loads the baseline and generates its continuations, which takes most of the time; it stays in memory
    until :meth:`close`. Raises :class:`~kimicore.ConfigError` for wrong arguments, before anything is loaded, and
    :class:`~kimicore.ModelLoadError`.
    """

    def __init__(
        self,
        baseline: str | os.PathLike[str],
        *,
        prompts: int = 200,
        new_tokens: int = 64,
        prompt_tokens: int = 128,
        texts: Sequence[str] = (),
        text_tokens: int = 2048,
        threads: int | None = None,
        progress: Progress | None = None,
        seed: int = 0,
    ) -> None:
        integer("prompts", prompts, 1, 1 << 20, ConfigError)
        self.new_tokens = integer("new_tokens", new_tokens, 2, 1 << 16, ConfigError)
        integer("prompt_tokens", prompt_tokens, 1, 1 << 20, ConfigError)
        integer("text_tokens", text_tokens, 0, 1 << 24, ConfigError)
        self.corpus = from_files(texts, prompts) if texts else built_in(prompts)
        self.seed = integer("seed", seed, 0, 1 << 32, ConfigError)
        self.choice = ModelChoice(baseline, "float32", "none")
        self._threads, self._progress = threads, progress
        self._most_tokens = prompt_tokens + new_tokens + 1
        with self._open(self.choice) as opened:
            self.baseline: OpenedModel = opened
            if opened.context_tokens <= new_tokens:
                raise ConfigError(
                    f"new_tokens={new_tokens}: {baseline} takes at most {opened.context_tokens} tokens, prompt included"
                )
            self._most_tokens = opened.context_tokens
            prompt_tokens = min(prompt_tokens, opened.context_tokens - new_tokens)
            self._prompts = [opened.tokenizer.encode(one.text)[:prompt_tokens] for one in self.corpus.prompts]
            self.continuations = opened.continuations(self._prompts, new_tokens)
        continued = [
            ForcedText((*prompt, *found), len(prompt), len(prompt))
            for prompt, found in zip(self._prompts, self.continuations, strict=True)
        ]
        self._windows, windows = self._cut(self.corpus, text_tokens)
        batches = batches_of(continued)
        self._compared_batches, count = len(batches), len(continued)
        self._batches = (*batches, *[tuple([count + index for index in one]) for one in batches_of(windows)])
        self._texts = [*continued, *windows]
        with using_threads(threads):
            self._read_baseline()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the baseline; may be called twice."""
        for name in ("_known", "_losses", "_forcing", "baseline"):
            self.__dict__.pop(name, None)

    def score(self, candidate: Transformer, *, texts: bool = True) -> Measured:
        """Return the scores of a model whose token ids are the baseline's, teacher-forced over the continuations.

        ``texts``: measure perplexity as well. Raises :class:`~kimicore.RequestFailed` where logits are not finite and
        :class:`~kimicore.ConfigError` for a model with fewer token ids.
        """
        if candidate.spec.vocab_size < self.baseline.known_tokens:
            raise ConfigError(
                f"the candidate has {candidate.spec.vocab_size} tokens and the baseline {self.baseline.known_tokens}: "
                "only models of one vocabulary can be compared"
            )
        if candidate.spec.context_tokens < self._most_tokens:
            raise ConfigError(
                f"the candidate takes {candidate.spec.context_tokens} tokens at most and {self._most_tokens} are needed"
            )
        with using_threads(self._threads):
            forcing = Forcing(candidate, self._texts, self._batches)
            compared = self._compared(candidate, forcing)
            found = self._losses_of(candidate, forcing, "comparing with the baseline") if texts else []
        categories = dict.fromkeys(one.category for one in self.corpus.prompts)
        return Measured(
            self._scores(compared, found, None), {one: self._scores(compared, found, one) for one in categories}
        )

    def score_model(
        self, choice: ModelChoice, *, edit: bool = True, texts: bool = True
    ) -> tuple[Measured, ComparedModel]:
        """Load a model, score it, and return the scores and what was compared.

        ``edit``: let it continue the prompts by itself as well. Raises what :meth:`score` does, and
        :class:`~kimicore.ModelLoadError`.
        """
        with self._open(choice) as opened:
            check_same_vocabulary(self.baseline.vocabulary, opened.vocabulary, self.corpus.texts.values())
            measured = self.score(opened.transformer, texts=texts)
            if edit:
                measured = self._with_edits(measured, opened.continuations(self._prompts, self.new_tokens))
            return measured, _record(opened)

    def noise(self, *, edit: bool = True) -> Measured:
        """Return the scores of the baseline in bfloat16: what rounding alone does."""
        return self.score_model(evolve(self.choice, dtype="bfloat16"), edit=edit)[0]

    def baseline_record(self) -> ComparedModel:
        """Return what candidates are compared with."""
        return _record(self.baseline)

    # ------------------------------------------------------------ the baseline

    def _open(self, choice: ModelChoice) -> OpenedModel:
        return OpenedModel(choice, tokens=self._most_tokens, threads=self._threads, progress=self._progress)

    def _cut(self, corpus: Corpus, text_tokens: int) -> tuple[list[str], list[ForcedText]]:
        """Return the texts in windows, and the category of each."""
        categories: list[str] = []
        windows: list[ForcedText] = []
        tokenizer = self.baseline.tokenizer
        head = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
        size = min(WINDOW_TOKENS, self._most_tokens - 1)
        for category, text in corpus.texts.items():
            ids = tokenizer.encode(text, add_bos=False)[:text_tokens]
            for start in range(0, len(ids), size):
                window = (*head, *ids[start : start + size])
                if len(window) > 1:
                    windows.append(ForcedText(window, 1, len(window)))
                    categories.append(category)
        return categories, windows

    def _read_baseline(self) -> None:
        """Keep of the continuations the hidden states, as far as there is room, and of the texts the losses."""
        self._forcing = Forcing(self.baseline.transformer, self._texts, self._batches)
        self._known: list[Tensor | None] = []
        room = KEPT_BYTES
        for number in range(self._compared_batches):
            self._say("reading with the baseline", number)
            kept = self._forcing.hidden(number) if room > 0 else None
            room -= 0 if kept is None else kept.numel() * kept.element_size()
            self._known.append(kept)
        self._losses = self._losses_of(self.baseline.transformer, self._forcing, "reading with the baseline")

    def _losses_of(self, model: Transformer, forcing: Forcing, what: str) -> list[Floats]:
        """Return the losses of each window of the texts."""
        found: list[Floats] = []
        for number in range(self._compared_batches, len(self._batches)):
            self._say(what, number)
            windows = [self._texts[index] for index in self._batches[number]]
            targets = [token for one in windows for token in one.targets]
            whole = losses(model, forcing.hidden(number), targets, self.baseline.known_tokens)
            found += np.split(whole, np.cumsum([len(one.targets) for one in windows])[:-1])
        return found

    def _say(self, what: str, number: int) -> None:
        if self._progress is not None:
            self._progress(what, number, len(self._batches))

    # ------------------------------------------------------------ a candidate

    def _compared(self, candidate: Transformer, forcing: Forcing) -> list[Compared]:
        """Return for each prompt how the candidate compares over its continuation."""
        found: list[Compared] = []
        for number in range(self._compared_batches):
            self._say("comparing with the baseline", number)
            kept = self._known[number]
            known = self._forcing.hidden(number) if kept is None else kept
            own = forcing.hidden(number)
            whole = compare(self.baseline.transformer, known, candidate, own, self.baseline.known_tokens)
            for start in range(0, len(whole.agree), self.new_tokens):
                part = slice(start, start + self.new_tokens)
                found.append(Compared(whole.agree[part], whole.kl[part]))
        return found

    def _scores(self, compared: Sequence[Compared], found: Sequence[Floats], category: str | None) -> Scores:
        """Return what the results of a category say (None: of all)."""
        mine = [
            one
            for one, prompt in zip(compared, self.corpus.prompts, strict=True)
            if category in (None, prompt.category)
        ]
        texts: list[float | None] = [None, None]
        if found and any(category in (None, one) for one in self._windows):
            own = [category in (None, one) for one in self._windows]
            texts = [perplexity(np.concatenate(list(compress(each, own)))) for each in (found, self._losses)]
        return Scores(
            len(mine),
            self.new_tokens * len(mine),
            estimate(np.array([one.agree.mean() for one in mine]), self.seed),
            estimate(np.array([one.kl.mean() for one in mine]), self.seed),
            None,
            *texts,
        )

    def _with_edits(self, measured: Measured, found: Sequence[Sequence[int]]) -> Measured:
        """Return the scores with the edit similarity of continuations that the model found by itself."""
        values = np.array([similarity(a, b) for a, b in zip(found, self.continuations, strict=True)])

        def edited(scores: Scores, category: str | None) -> Scores:
            mine = np.array([category in (None, one.category) for one in self.corpus.prompts])
            return evolve(scores, edit=estimate(values[mine], self.seed))

        own = {key: edited(scores, key) for key, scores in measured.by_category.items()}
        return Measured(edited(measured.all, None), own)


def _record(opened: OpenedModel) -> ComparedModel:
    choice, size = opened.choice, opened.transformer.weight_bytes
    how = choice.dtype, choice.precision, size, tuple(choice.skip_layers), choice.activations
    return ComparedModel(os.fspath(choice.model), opened.fingerprint, *how)
