"""How much each layer does: by what it changes of the stream, and by what the model loses without it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib.resources import files
from types import TracebackType
from typing import Self

import torch
from attrs import evolve
from torch import Tensor

from kimicore.errors import ModelLoadError
from kimicore.model.transformer import Transformer
from kimicore.quantize.calibration import KINDS
from kimicore.quantize.decoder import Decoder
from kimicore.quantize.reading import ModelReader
from kimicore.verify.scorer import Scorer

__all__ = ["Loss", "block_influence", "keeping"]

Progress = Callable[[str, int, int], None]
_TOKENS = 32


def block_influence(
    reader: ModelReader, token_ids: Tensor, kept: Sequence[int], progress: Progress | None = None
) -> tuple[float, ...]:
    """Return the influence of each of the ``kept`` layers in a model that has no others, on sequences [N, T].

    That is 1 less the mean cosine between a position's hidden state before the layer and behind it, in float32: 0 for
    a layer that turns nothing, 2 at the most (Men et al. 2024, "ShortGPT"). One layer is in memory at a time, beside
    the stream. Raises :class:`~kimicore.ModelLoadError` where a stream is not finite.
    """
    found: list[float] = []
    with torch.inference_mode():
        decoder = Decoder.make(reader.spec, token_ids.shape[1])
        hidden = decoder.embed(reader.embedding(), token_ids)
        for number, index in enumerate(kept):
            if progress is not None:
                progress("influence", number, len(kept))
            after = decoder.layer(hidden, reader.layer(index), index)
            # In double: a layer that does nothing has to come out at nothing.
            turned = torch.cat([_cosines(*pair) for pair in zip(hidden, after, strict=True)])
            if not torch.isfinite(turned).all():
                raise ModelLoadError(
                    f"{reader.source.path}: what comes out of layer {index} is not finite: its weights are damaged"
                )
            found.append(max(0.0, 1.0 - float(turned.mean())))
            hidden = after
    return tuple(found)


def _cosines(before: Tensor, after: Tensor) -> Tensor:
    """Return the cosine of each position [T] between two states [T, C] of it, in float64."""
    return torch.nn.functional.cosine_similarity(before.double(), after.double(), dim=-1)


def keeping(model: Transformer, kept: Sequence[int], known_tokens: int | None = None) -> Transformer:
    """Return a model that has these layers of one in memory alone; the weights are shared, not copied.

    ``known_tokens``: as in :meth:`Transformer.load`.
    """
    spec = evolve(model.spec, layers=tuple([model.spec.layers[one] for one in kept]))
    weights = evolve(model.weights, layers=tuple([model.weights.layers[one] for one in kept]))
    return Transformer(spec, weights, model.ops, known_tokens=known_tokens)


class Loss:
    """What a model loses without some layers: KL(whole || pruned) in nats a token; a context manager.

    It is measured over the model's own continuations of ``prompts`` prompts from the calibration texts, none of which
    ``kimicore verify`` judges by. Raises what :class:`~kimicore.verify.Scorer` does.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        prompts: int = 50,
        threads: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        folder = files("kimicore.quantize") / "texts"
        self._scorer = Scorer(
            model,
            prompts=prompts,
            new_tokens=_TOKENS,
            texts=[str(folder / f"{kind}.txt") for kind in KINDS],
            text_tokens=0,
            threads=threads,
            progress=progress,
        )

    def __call__(self, kept: Sequence[int]) -> float:
        """Return the loss of the model that has these layers alone."""
        candidate = keeping(self._scorer.baseline.transformer, kept, self._scorer.baseline.known_tokens)
        return self._scorer.score(candidate, texts=False).all.kl.value

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._scorer.close()
