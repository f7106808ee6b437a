"""A whole run: from a model to the layers that go, and to a folder without them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from attrs import asdict, frozen

from kimicore import __version__
from kimicore.assembly import RECORD_FILE
from kimicore.checks import integer
from kimicore.errors import ConfigError
from kimicore.model.load import open_source
from kimicore.model.skipping import LayerCut
from kimicore.model.source import WeightSource
from kimicore.model.spec import spec_from_config
from kimicore.pruning.carrying import precision_map
from kimicore.pruning.choosing import MEASURES, Choice, check_count, choose
from kimicore.pruning.folder import check_storable, stored_bytes, write_folder
from kimicore.pruning.influence import Loss, block_influence
from kimicore.quantize.calibration import calibration_texts, calibration_tokens, texts_digest
from kimicore.quantize.files import disk_errors, needs_bytes
from kimicore.quantize.reading import ModelReader
from kimicore.quantize.run import check_apart, check_target, take_place
from kimicore.text.tokenizer import Tokenizer
from kimicore.verify.opened import using_threads

__all__ = ["PruneSettings", "Pruned", "choose_layers", "prune_model", "write_without"]

Progress = Callable[[str, int, int], None]
_FORMAT: Final = "kimicore prune"
_VERSION: Final = 1
_SPARE_BYTES: Final = 64 << 20


@frozen
class PruneSettings:
    """How layers are chosen.

    ``measure``: "influence", or "kl": of those of least influence the one goes that costs least, measured on
    ``prompts`` prompts. Influence is measured on ``samples`` sequences of ``sample_tokens`` tokens. ``threads``:
    torch's, None: as they are. Raises :class:`~kimicore.ConfigError`.
    """

    measure: str = "influence"
    samples: int = 20
    sample_tokens: int = 256
    prompts: int = 50
    threads: int | None = None

    def __attrs_post_init__(self) -> None:
        if self.measure not in MEASURES:
            raise ConfigError(f"measure={self.measure!r:.80}: must be one of {', '.join(MEASURES)}")
        integer("samples", self.samples, 1, 1 << 16, ConfigError)
        integer("sample_tokens", self.sample_tokens, 2, 1 << 16, ConfigError)
        integer("prompts", self.prompts, 1, 1 << 20, ConfigError)
        if self.threads is not None:
            integer("threads", self.threads, 1, 1024, ConfigError)


@frozen
class Pruned:
    """What a run wrote: the folder, the layers that went, and the bytes of the weights."""

    folder: Path
    choice: Choice
    weight_bytes: int


def choose_layers(
    model: str | os.PathLike[str],
    count: int,
    settings: PruneSettings | None = None,
    *,
    texts: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Choice:
    """Return which ``count`` layers of a model go, and the influence of each one; nothing is written.

    ``texts``: what influence is measured on, by kind; None: the calibration set that ships.

    Raises :class:`~kimicore.ConfigError` for a count that the model cannot spare, and
    :class:`~kimicore.ModelLoadError`.
    """
    settings = settings or PruneSettings()
    check_count(count)
    reader = ModelReader.of(open_source(model, progress=progress))
    layers = len(reader.spec.layers)
    check_count(count, layers)
    tokens = min(settings.sample_tokens, reader.spec.context_tokens)
    tokenizer = Tokenizer.from_source(reader.source.text)
    ids = calibration_tokens(tokenizer, texts or calibration_texts(), settings.samples, tokens)
    with ExitStack() as stack:
        stack.enter_context(using_threads(settings.threads))
        loss = None
        if settings.measure == "kl":
            loss = stack.enter_context(
                Loss(model, prompts=settings.prompts, threads=settings.threads, progress=progress)
            )
        return choose(layers, count, lambda kept: block_influence(reader, ids, kept, progress), loss)


def prune_model(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    count: int,
    settings: PruneSettings | None = None,
    *,
    texts: Mapping[str, str] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Pruned:
    """Write a model without its ``count`` layers of least influence into the folder ``out``, which loads by itself.

    ``model``: what :func:`kimicore.model.load.open_source` takes. ``overwrite``: replace ``out``. See
    :func:`choose_layers` for the other arguments and :func:`write_without` for what is written.

    Raises :class:`~kimicore.ConfigError` for a place that cannot be written and a count that the model cannot spare,
    before anything is measured, and :class:`~kimicore.ModelLoadError` for a model that cannot be read.
    """
    settings = settings or PruneSettings()
    check_count(count)
    target = check_target(Path(out).expanduser(), overwrite)
    source = open_source(model, progress=progress)
    _check(source, target, overwrite)
    choice = choose_layers(model, count, settings, texts=texts, progress=progress)
    told = asdict(settings, filter=lambda field, _: field.name != "threads")
    if settings.measure == "influence":
        del told["prompts"]
    return write_without(
        source, target, choice, overwrite=overwrite, **told, texts=texts_digest(texts or calibration_texts())
    )


def _check(source: WeightSource, target: Path, overwrite: bool) -> Path:
    """Return the place beside the target where the work lies; raises :class:`~kimicore.ConfigError`."""
    check_apart(source, target)
    check_storable(source)
    whole = LayerCut.of(len(spec_from_config(source.config).layers), ())
    needs_bytes(target.resolve().parent, sum(stored_bytes(source, whole).values()) + _SPARE_BYTES)
    work = target.with_name(f"{target.name}.partial")
    if work.exists() and not overwrite:
        raise ConfigError(f"{work}: is left of an interrupted run; delete it, name another --out, or give --overwrite")
    return work


def write_without(
    source: WeightSource, out: str | os.PathLike[str], choice: Choice, *, overwrite: bool = False, **told: Any
) -> Pruned:
    """Write a source without the layers that a choice names into the folder ``out``, as a whole or not at all.

    Tensors of a safetensors folder keep their bytes, be they quantized or not; a GGUF file's come in bfloat16.
    Beside them ``kimicore.json`` says which layers went, the influence of each, and what is ``told`` of the measuring.
    Where the source has a precision map beside its weights, so has the folder, without the lost layers.

    Raises :class:`~kimicore.ConfigError` and :class:`~kimicore.ModelLoadError`.
    """
    target = check_target(Path(out).expanduser(), overwrite)
    work = _check(source, target, overwrite)
    cut = LayerCut.of(len(choice.influence), choice.skip_layers)
    record: dict[str, Any] = {
        "format": _FORMAT,
        "version": _VERSION,
        "kimicore": __version__,
        "source": source.fingerprint,
        "settings": told,
        "influence": list(choice.influence),
        "removed": [asdict(one) for one in choice.removals],
    }
    found = precision_map(source.path, cut)
    if found is not None:
        record["map"] = found
    with disk_errors(work):
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
    try:
        size = write_folder(source, cut, work, record, RECORD_FILE)
        take_place(work, target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return Pruned(target, choice, size)
