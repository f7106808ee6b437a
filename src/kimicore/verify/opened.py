"""A model opened for a comparison: its engine to generate with, and its forward pass."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import torch
from attrs import frozen

from kimicore.config import EngineConfig
from kimicore.errors import ConfigError
from kimicore.model.load import open_source
from kimicore.model.skipping import without_layers
from kimicore.model.source import WeightSource
from kimicore.model.spec import spec_from_config
from kimicore.model.transformer import Transformer
from kimicore.policies.precision.named import policy_named
from kimicore.runner import ModelRunner
from kimicore.sync import SyncEngine
from kimicore.text.tokenizer import Tokenizer

__all__ = ["ModelChoice", "OpenedModel", "Vocabulary", "check_same_vocabulary", "using_threads", "vocabulary_of"]

Progress = Callable[[str, int, int], None]
GROUP = 64
"""Prompts that are generated for at a time, so that there is progress to show."""


@frozen
class ModelChoice:
    """Which model, and how it is loaded: the other fields are those of :class:`~kimicore.EngineConfig`.

    ``policy``: the settings of the precision policy alone.
    """

    model: str | os.PathLike[str]
    dtype: str = "float32"
    precision: str = "stored"
    policy: Mapping[str, Any] = {}
    skip_layers: Sequence[int] = ()
    activations: str = "map"

    @property
    def told(self) -> str:
        """The choice in words."""
        loaded = "" if self.precision == "stored" else f" by {self.precision!r}"
        gone = f" without {len(self.skip_layers)} layers" if self.skip_layers else ""
        return f"{self.model}{gone}{loaded} in {self.dtype}"

    @property
    def as_stored(self) -> bool:
        """Whether the weights are all of those in the model's files, as they are and used as is said there."""
        return self.precision == "stored" and not self.skip_layers and self.activations == "map"

    def check(self) -> None:
        """Raise :class:`~kimicore.ConfigError` or :class:`~kimicore.PluginError` where the settings cannot be right."""
        self.config(1 << 10, None)
        if self.precision not in ("stored", "none"):
            policy_named(self.precision, self.policy)

    def config(self, tokens: int, threads: int | None) -> EngineConfig:
        """Return the settings of an engine for sequences of at most ``tokens`` tokens; raises ConfigError."""
        return EngineConfig(
            dtype=self.dtype,
            precision=self.precision,
            policy={"precision": dict(self.policy)} if self.policy else {},
            skip_layers=self.skip_layers,
            activations=self.activations,
            threads=threads,
            max_batch_size=GROUP,
            max_batch_tokens=512,
            context_tokens=tokens,
            prefix_cache=False,
        )

    def source(self, progress: Progress | None = None) -> WeightSource:
        """Return the model's files without the layers that are skipped.

        Raises :class:`~kimicore.ConfigError` where it has no such layers, and :class:`~kimicore.ModelLoadError`.
        """
        return without_layers(open_source(self.model, progress=progress), self.skip_layers)


@frozen(eq=False)
class Vocabulary:
    """A model's name, its tokenizer, and how many token ids have logits."""

    model: str
    tokenizer: Tokenizer
    tokens: int


class OpenedModel:
    """A model in memory; a context manager that closes its engine."""

    def __init__(self, choice: ModelChoice, *, tokens: int, threads: int | None, progress: Progress | None) -> None:
        self.choice = choice
        self._progress = progress
        source = choice.source(progress)
        self.fingerprint = source.fingerprint
        tokens = min(tokens, spec_from_config(source.config).context_tokens)
        self._engine = SyncEngine(choice.model, choice.config(tokens, threads), progress=progress)
        self._engine.open()
        runner = self._engine.face.loop.runner
        assert isinstance(runner, ModelRunner)
        self.transformer: Transformer = runner.model
        self.tokenizer: Tokenizer = self._engine.face.loop.tokenizer
        self.context_tokens: int = self._engine.face.loop.context_tokens

    @property
    def known_tokens(self) -> int:
        """How many token ids have logits."""
        return min(self.transformer.spec.vocab_size, self.tokenizer.vocab_size)

    @property
    def vocabulary(self) -> Vocabulary:
        """What its token ids mean."""
        return Vocabulary(str(self.choice.model), self.tokenizer, self.known_tokens)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the engine; who holds :attr:`transformer` keeps the weights."""
        self._engine.close()

    def continuations(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[tuple[int, ...]]:
        """Return the greedy continuation of each prompt, ``new_tokens`` long whatever tokens end a text."""
        found: list[tuple[int, ...]] = []
        for first in range(0, len(prompts), GROUP):
            if self._progress is not None:
                self._progress(f"generating with {self.choice.told}", first, len(prompts))
            batch = prompts[first : first + GROUP]
            results = self._engine.generate_many(batch, max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
            found += [one.token_ids for one in results]
        return found


def vocabulary_of(choice: ModelChoice) -> Vocabulary:
    """Return a model's vocabulary from its files; raises what :meth:`ModelChoice.source` does."""
    source = choice.source()
    tokenizer = Tokenizer.from_source(source.text)
    tokens = min(spec_from_config(source.config).vocab_size, tokenizer.vocab_size)
    return Vocabulary(str(choice.model), tokenizer, tokens)


def check_same_vocabulary(baseline: Vocabulary, candidate: Vocabulary, texts: Iterable[str]) -> None:
    """Raise :class:`~kimicore.ConfigError` where two models do not read and write the same tokens."""
    names = f"{candidate.model} and {baseline.model} cannot be compared"
    if baseline.tokens != candidate.tokens:
        raise ConfigError(f"{names}: the candidate has {candidate.tokens} tokens and the baseline {baseline.tokens}")
    one, other = baseline.tokenizer, candidate.tokenizer
    if one.version == other.version:
        return
    for token in range(baseline.tokens):
        first, second = one.token_bytes(token), other.token_bytes(token)
        if first != second:
            raise ConfigError(f"{names}: token {token} is {second!r} in the candidate and {first!r} in the baseline")
    for text in texts:
        if one.encode(text) != other.encode(text):
            raise ConfigError(f"{names}: their tokenizers cut {text[:60]!r} into other tokens")


@contextmanager
def using_threads(count: int | None) -> Iterator[None]:
    """Run the body with this many of torch's threads (None: as many as there are)."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
