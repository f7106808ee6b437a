"""A whole run: from a model and a map to a folder that loads by itself."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from attrs import frozen
from torch import Tensor

from kimicore.errors import ConfigError
from kimicore.kernels.packed_linear.layout import PackedWeight
from kimicore.model.load import open_source
from kimicore.model.modules import modules_of
from kimicore.model.source import WeightSource
from kimicore.policies.precision.formats import PRECISIONS
from kimicore.policies.precision.resolving import ResolvedMap
from kimicore.quantize.calibration import calibration_texts, calibration_tokens, texts_digest
from kimicore.quantize.decoder import Decoder
from kimicore.quantize.files import disk_errors, needs_bytes, write_safetensors
from kimicore.quantize.finish import write_model
from kimicore.quantize.layers import LayerRounding, Stored, kept_as, round_matrix, stored_weight
from kimicore.quantize.layout import file_tensors
from kimicore.quantize.methods import QuantizeSettings
from kimicore.quantize.partial import PartialRun
from kimicore.quantize.reading import ModelReader
from kimicore.quantize.reuse import EarlierLayers
from kimicore.quantize.statistics import InputStatistics
from kimicore.text.tokenizer import Tokenizer

__all__ = ["Quantized", "check_apart", "check_target", "quantize_model", "take_place"]

Progress = Callable[[str, int, int], None]
_VERSION: Final = 1  # of what the steps compute; a run of another version is not gone on with
_SPARE_BYTES: Final = 64 << 20
_STREAM_BYTES: Final = 2 << 30  # of activations between layers that are kept for a next run


@frozen
class Quantized:
    """What a run wrote: the folder, its map, the bytes of its weights, and from which layer on it was computed now.

    ``layers_reused``: how many layers were there already, from an interrupted or an earlier run.
    """

    folder: Path
    found: ResolvedMap
    weight_bytes: int
    resumed_at: int
    layers_reused: int

    @property
    def ffn_share(self) -> float:
        """The share of the feed-forward weights' bytes at 16 bits that are now kept in fewer."""
        sizes = [(one.module.shape, one.precision) for one in self.found.modules if one.module.kind == "ffn"]
        counts = [(torch.Size(shape).numel(), PRECISIONS[precision].bits < 16) for shape, precision in sizes]
        total = sum(count for count, _ in counts)
        return sum(count for count, fewer in counts if fewer) / total if total else 0.0


def quantize_model(
    model: str | os.PathLike[str] | WeightSource,
    out: str | os.PathLike[str],
    found: ResolvedMap,
    settings: QuantizeSettings | None = None,
    *,
    texts: Mapping[str, str] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    earlier: EarlierLayers | None = None,
) -> Quantized:
    """Round a model's weights as a map says and write them into the folder ``out``, which then loads by itself.

    ``model``: what :func:`kimicore.model.load.open_source` takes, or a source. ``found``: the map, resolved against the
    model's own modules. ``texts``: what it is calibrated on, by kind; None: the set that ships. ``overwrite``: replace
    ``out``, and begin anew where a partial folder is of another run. ``progress("layers", done, all)`` is called after
    each layer. ``earlier``: what the run before in a series left; layers that are the same are taken from it, and this
    run's are left there.

    The work lies in ``out`` with ".partial" behind its name until all is there, and then takes its place at once. A
    run that was interrupted goes on at the layer where it stopped, with the same result.

    Raises :class:`~kimicore.ConfigError` for a place that cannot be written and a map of another model, and
    :class:`~kimicore.ModelLoadError` for a model that cannot be read or weights that are not finite.
    """
    settings = settings or QuantizeSettings()
    target = check_target(Path(out).expanduser(), overwrite)
    source = open_source(model) if isinstance(model, (str, os.PathLike)) else model
    check_apart(source, target)
    job = _Job.of(source, target, found, settings, texts or calibration_texts(), overwrite, progress, earlier)
    with torch.inference_mode():
        resumed, reused = job.layers()
        job.tables()
    size = write_model(job.reader, job.partial, found, job.record)
    take_place(job.partial.folder / "model", target)
    if earlier is not None:
        earlier.keep(job.partial, found, job.record)
    else:
        with disk_errors(target):
            shutil.rmtree(job.partial.folder)
    return Quantized(target, found, size, resumed, reused)


def check_target(target: Path, overwrite: bool) -> Path:
    """Return a place that can be written; raises :class:`~kimicore.ConfigError` where it is taken or cannot be."""
    if target.exists() and not overwrite:
        raise ConfigError(f"{target}: is there already; name another --out, or give --overwrite")
    if target.exists() and not (target.is_dir() and (not any(target.iterdir()) or (target / "config.json").exists())):
        raise ConfigError(f"{target}: is no model's folder, so it is not replaced; name another --out")
    parent = target.resolve().parent
    if not parent.is_dir():
        raise ConfigError(f"{target}: there is no folder {parent}")
    if not os.access(parent, os.W_OK):
        raise ConfigError(f"{target} cannot be written: permission denied in {parent}")
    return target


def check_apart(source: WeightSource, target: Path) -> None:
    """Refuse to replace what is read; raises :class:`~kimicore.ConfigError`."""
    if source.path.resolve().is_relative_to(target.resolve()):
        raise ConfigError(f"{target}: is where the model itself lies; name another --out")


def take_place(made: Path, target: Path) -> None:
    """Let a finished folder take its place; what was there goes only when it has."""
    with disk_errors(target):
        old = target.with_name(f"{target.name}.old")
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
        made.rename(target)
        shutil.rmtree(old, ignore_errors=True)


@frozen(eq=False)
class _Job:
    """A run at work."""

    reader: ModelReader
    found: ResolvedMap
    settings: QuantizeSettings
    token_ids: Tensor | None
    partial: PartialRun
    record: dict[str, Any]
    progress: Progress | None

    @classmethod
    def of(
        cls,
        source: WeightSource,
        target: Path,
        found: ResolvedMap,
        settings: QuantizeSettings,
        texts: Mapping[str, str],
        overwrite: bool,
        progress: Progress | None,
        earlier: EarlierLayers | None,
    ) -> _Job:
        """Return the job, everything checked and its partial folder there, earlier layers in it."""
        reader = ModelReader.of(source)
        _check_same_modules(reader, found)
        ids, record = None, _record(source, settings)
        if settings.method.calibrated:
            tokenizer = Tokenizer.from_source(source.text)
            tokens = min(settings.sample_tokens, reader.spec.context_tokens)
            ids = calibration_tokens(tokenizer, texts, settings.samples, tokens)
            record["calibration"] = {"texts": texts_digest(texts), "sequences": len(ids), "tokens": ids.numel()}
        digest = hashlib.blake2b(
            json.dumps([_VERSION, record, found.fingerprint.hex()], sort_keys=True).encode(), digest_size=16
        ).hexdigest()
        every, kept_bytes = (0, 0) if earlier is None or ids is None else _kept_streams(reader, ids)
        needs_bytes(target.resolve().parent, 2 * found.weight_bytes + kept_bytes + _SPARE_BYTES)
        partial = PartialRun.open(target, digest, record, anew=overwrite, every=every)
        if earlier is not None:
            earlier.give(partial, found, record, calibrated=settings.method.calibrated)
        return cls(reader, found, settings, ids, partial, record, progress)

    def _show(self, done: int) -> None:
        if self.progress is not None:
            self.progress("layers", done, len(self.reader.spec.layers))

    def embedding(self) -> tuple[Stored, Tensor]:
        """Return the embedding as it is kept, and its values in float32."""
        name = "embed_tokens"
        weight, precision = self.reader.embedding(), self.found.precision(name)
        if PRECISIONS[precision].kind == "int":
            stored: Stored = {f"{name}.weight": round_matrix(weight, precision, name, None, self.settings)}
        else:
            stored = {f"{name}.weight": kept_as(weight, precision, name)}
        return stored, stored_weight(stored[f"{name}.weight"])

    def layers(self) -> tuple[int, int]:
        """Quantize all layers that are not there yet; return the first that was not, and how many were."""
        spec, ids = self.reader.spec, self.token_ids
        done = self.partial.done_layers()
        tokens = 1 if ids is None else ids.shape[1]
        precisions = {one.module.name: one.precision for one in self.found.modules}
        rounding = LayerRounding(Decoder.make(spec, tokens), precisions, self.settings)
        hidden = None
        if ids is not None:
            hidden = self.partial.hidden(done) if done else rounding.decoder.embed(self.embedding()[1], ids)
            if hidden is None:  # its file was lost: nothing can be built on
                done, hidden = 0, rounding.decoder.embed(self.embedding()[1], ids)
        self._show(done)
        reused = done
        for index in range(done, len(spec.layers)):
            if ids is None and self.partial.has_layer(index):  # no layer asks for those before it
                reused += 1
            else:
                stored, hidden = rounding.quantize(index, self.reader.layer(index), hidden)
                self.partial.keep(index, file_tensors(stored, f"model.layers.{index}."), hidden)
            self._show(index + 1)
        return done, reused

    def tables(self) -> None:
        """Keep what belongs to no layer: embedding, last norm and head."""
        reader, found = self.reader, self.found
        norm = kept_as(reader.final_norm(), found.precision("norm"), "norm")
        stored, _ = self.embedding()
        tensors = file_tensors({**stored, "norm.weight": norm}, "model.")
        head = reader.own_head()
        if head is not None:
            tensors |= file_tensors({"lm_head.weight": self._head(head, norm)}, "")
        write_safetensors(self.partial.part_path("tables"), tensors)

    def _head(self, head: Tensor, norm: Tensor) -> Tensor | PackedWeight:
        """Return the output matrix as it is kept, rounded with an eye on what comes out of the last layer."""
        if self.reader.spec.tied:  # a map has no word for the head of a tied model; it is as the embedding is kept
            precision = self.found.precision("embed_tokens")
            return kept_as(head, precision if PRECISIONS[precision].kind == "float" else "bfloat16", "lm_head")
        precision = self.found.precision("lm_head")
        if PRECISIONS[precision].kind == "float":
            return kept_as(head, precision, "lm_head")
        inputs = None
        if self.token_ids is not None:
            hidden = self.partial.hidden(len(self.reader.spec.layers))
            if hidden is not None:
                decoder = Decoder.make(self.reader.spec, 1)
                inputs = InputStatistics.of(decoder.norm(hidden, norm.float()))
        return round_matrix(head, precision, "lm_head", inputs, self.settings)


def _kept_streams(reader: ModelReader, token_ids: Tensor) -> tuple[int, int]:
    """Return that what enters each n-th layer is kept for a next run, and the bytes that this takes."""
    layers, stream_bytes = len(reader.spec.layers), token_ids.numel() * reader.spec.hidden_size * 4
    every = max(1, -(-layers * stream_bytes // _STREAM_BYTES))
    return every, (layers // every) * stream_bytes


def _check_same_modules(reader: ModelReader, found: ResolvedMap) -> None:
    """Refuse a map that was resolved against other modules; raises :class:`~kimicore.ConfigError`."""
    if [one.module for one in found.modules] != list(modules_of(reader.spec)):
        raise ConfigError(f"the map is not of {reader.source.path}: resolve it against the model's own modules")


def _record(source: WeightSource, settings: QuantizeSettings) -> dict[str, Any]:
    """Return what a run is a run of, but for its map."""
    own: dict[str, Any] = {"method": settings.method.name, "source": source.fingerprint}
    if settings.method.calibrated:
        own["settings"] = {"samples": settings.samples, "sample_tokens": settings.sample_tokens}
    if settings.method.rounding == "compensated":
        own["settings"] |= {"damping": settings.damping, "act_order": settings.act_order}
    return own
