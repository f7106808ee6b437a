"""Building an engine from a model's name and settings: everything that needs torch is imported from here."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kimicore.book import Book
from kimicore.clock import MonotonicClock
from kimicore.config import EngineConfig
from kimicore.errors import ConfigError, ForkedProcess, ModelLoadError
from kimicore.importance import Importance
from kimicore.kernels.registry import select_ops
from kimicore.kv.arena import Arena
from kimicore.loop import EngineLoop
from kimicore.memory import available_bytes, give_back
from kimicore.model.importance_table import ImportanceTable, table_path
from kimicore.model.kv_layout import kv_classes
from kimicore.model.load import open_source
from kimicore.model.modules import modules_of
from kimicore.model.products import packed_product
from kimicore.model.skipping import without_layers
from kimicore.model.spec import ModelSpec, spec_from_config
from kimicore.model.transformer import Transformer
from kimicore.plan import Planner
from kimicore.policies.precision import ActivationPrecision, ResolvedMap
from kimicore.policies.precision.named import policy_named, resolved_by
from kimicore.prefix import KeyContext
from kimicore.runner import ModelRunner
from kimicore.text.tokenizer import Tokenizer
from kimicore.tiering import lower_tiers
from kimicore.types import KVClass

if TYPE_CHECKING:
    from kimicore.kernels.registry import Ops
    from kimicore.model.source import WeightSource

__all__ = ["RECORD_FILE", "assemble", "choose_dtype", "keeps_packed"]

DEFAULT_KV_BYTES = 1 << 30
DEFAULT_KV_SHARE = 0.25

WARM_TOKENS = 64
RECORD_FILE = "kimicore.json"
"""What lies beside weights that were quantized or pruned here, and says how they were made."""
LOADED_IN = os.getpid()
"""The process that torch was loaded in: its threads do not survive a fork, and products in a child would hang."""

Progress = Callable[[str, int, int], None]


def assemble(model: str | os.PathLike[str], config: EngineConfig, progress: Progress | None) -> EngineLoop:
    """Load ``model`` and return its engine, not yet started."""
    _check_process()
    maps = _precision_policy(config)
    source = without_layers(open_source(model, progress=progress), config.skip_layers)
    spec = spec_from_config(source.config)
    dtype = choose_dtype(config.dtype)
    tokenizer = _tokenizer(source, spec)
    classes = kv_classes(
        spec,
        str(dtype).removeprefix("torch."),
        config.block_tokens,
        config.precisions,
        summaries=config.sparse_decode,
    )
    precision = None if maps is None else resolved_by(maps, modules_of(spec))
    rounds = _activations(config, source, precision)
    importance = _importance(os.fspath(model), source, classes, config)
    arena = _arena(classes, config)
    ops = select_ops("cpu", dtype, native=config.native_kernels, shapes=_weight_shapes(spec))
    known, packed = tokenizer.vocab_size, keeps_packed(config, ops)[0]
    transformer = Transformer.load(
        spec, source, ops, dtype, progress, known_tokens=known, packed=packed, precision=precision, activations=rounds
    )
    give_back()  # what loading took for a while
    runner = ModelRunner(transformer, arena, ops, config.block_tokens)
    warm = runner.warm_up(min(WARM_TOKENS, config.max_batch_tokens))
    clock = MonotonicClock()
    contexts = _contexts(classes, transformer, source, tokenizer)
    lower = lower_tiers(config, arena, contexts, clock)
    try:
        book = Book.from_config(
            classes=classes,
            slab_bytes=arena.slab_bytes,
            slabs=arena.slabs,
            config=config,
            contexts=contexts,
            rope_original_tokens=_rope_original_tokens(spec),
            secret=None if lower is None else lower.secret,
            tiers_of=None if lower is None else lower.tiers_of,
            importance=importance,
            activations=transformer.activations,
        )
        return EngineLoop(
            book=book,
            planner=Planner.from_config(config),
            runner=runner,
            tokenizer=tokenizer,
            config=config,
            clock=clock,
            context_tokens=spec.context_tokens,
            set_threads=_set_threads,
            carrier=None if lower is None else lower.mover,
            warm=warm,
        )
    except BaseException:
        if lower is not None:
            lower.mover.close(0.0)
        raise


def _check_process() -> None:
    if os.getpid() != LOADED_IN:
        raise ForkedProcess(
            f"an engine opened in process {LOADED_IN} before this one was forked from it, and torch's threads do not "
            "survive that: start the child with the 'spawn' method, or fork before the first engine opens"
        )


def _precision_policy(config: EngineConfig) -> Any:
    """Return the policy whose map rounds the weights, or None where they are as the file has them."""
    if config.precision in ("stored", "none"):
        return None
    return policy_named(config.precision, config.policy.get("precision"))


def _activations(
    config: EngineConfig, source: WeightSource, precision: ResolvedMap | None
) -> ActivationPrecision | None:
    """Return the precision of activations by the map in effect: that applied here, or the one beside the weights.

    Raises ModelLoadError where a record lies beside the weights and cannot be read.
    """
    if config.activations != "map" or config.precision == "none":
        return None
    if precision is not None:
        return precision.activations
    path = source.path / RECORD_FILE
    if not source.path.is_dir() or not path.exists():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if "map" not in record and record["format"] != "kimicore quantize":
            return None  # of a step that rounds nothing
        return ResolvedMap.from_json(json.dumps(record["map"])).activations
    except OSError as error:
        why: object = error.strerror or error
    except (ConfigError, KeyError, RecursionError, TypeError, ValueError) as error:
        why = error if isinstance(error, ConfigError) else repr(error)
    raise ModelLoadError(
        f"{path}: holds no precision map that can be read: {why!s:.300}; write it anew with kimicore quantize, or set "
        "activations='16-bit' to do without"
    )


def _rope_original_tokens(spec: ModelSpec) -> int | None:
    """Return the length from which a dynamic rope's factor grows, or None where the model has no such rope."""
    return spec.trained_tokens if any(one.kind == "dynamic" for one in spec.ropes) else None


def _tokenizer(source: WeightSource, spec: ModelSpec) -> Tokenizer:
    """Return the model's tokenizer; raises ModelLoadError where the two do not fit."""
    tokenizer = Tokenizer.from_source(source.text)
    if tokenizer.vocab_size > spec.vocab_size:
        raise ModelLoadError(
            f"{source.path}: the tokenizer has {tokenizer.vocab_size} tokens and the model {spec.vocab_size}"
        )
    ends = source.text.eos_ids
    if ends and not any(one < tokenizer.vocab_size for one in ends):
        raise ModelLoadError(
            f"{source.path}: eos_token_id={ends}: outside the vocabulary of {tokenizer.vocab_size} tokens"
        )
    return tokenizer


def _importance(
    model: str, source: WeightSource, classes: Sequence[KVClass], config: EngineConfig
) -> Importance | None:
    """Return what the settings ask for; raises ConfigError where there is no table and one is needed."""
    if config.importance == "off":
        return None
    fingerprint, size = source.fingerprint, config.block_tokens
    path = table_path(fingerprint, size) if config.importance_table is None else Path(config.importance_table)
    values: Sequence[Sequence[float]] = ()
    if config.importance == "table" or config.importance_table is not None or path.exists():
        try:
            names = [one.name for one in classes if one.precision == "full"]
            values = ImportanceTable.read(path.expanduser(), fingerprint, size, names).values
        except ConfigError as error:
            options = "" if size == 16 else f" --block-tokens {size}"
            options += f" --skip-layers {','.join(map(str, config.skip_layers))}" if config.skip_layers else ""
            options += "" if config.importance_table is None else f" --out {config.importance_table}"
            raise ConfigError(
                f"importance={config.importance!r}: {error}; run: kimicore warmup {model}{options}"
            ) from error
    return Importance(config.importance_every if config.importance == "attention" else 0, values)


def _set_threads(count: int) -> int:
    """Set torch's thread count and return the one before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    return before


def choose_dtype(name: str) -> torch.dtype:
    """Return the dtype for ``name``; "auto" is bfloat16 where the processor multiplies it natively, else float32."""
    if name == "auto":
        native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return torch.bfloat16 if native else torch.float32
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"dtype={name!r}: must be auto, float32, bfloat16 or float16")
    return dtype


def _weight_shapes(spec: ModelSpec) -> tuple[tuple[int, int], ...]:
    """Return the (outputs, inputs) of the model's products."""
    wide = spec.heads * spec.head_dim
    return (
        (wide + 2 * spec.kv_heads * spec.head_dim, spec.hidden_size),
        (spec.hidden_size, wide),
        (2 * spec.intermediate_size, spec.hidden_size),
        (spec.hidden_size, spec.intermediate_size),
        (spec.vocab_size, spec.hidden_size),
    )


def _arena(classes: Sequence[KVClass], config: EngineConfig) -> Arena:
    wanted = config.kv_device_bytes
    available = available_bytes()
    if wanted is None:
        wanted = min(DEFAULT_KV_BYTES, int(available * DEFAULT_KV_SHARE))
    elif wanted > available:
        raise ConfigError(f"kv_device_bytes={wanted}: only {available} bytes of memory are available")
    return Arena(classes, wanted)


def _described(kv_class: KVClass) -> bytes:
    """Return what the bytes of a class's blocks mean."""
    parts = [kv_class.name, kv_class.layers, kv_class.window, kv_class.dtype, kv_class.shape]
    if kv_class.summaries:
        parts.append("summaries")
    return " ".join(map(str, parts)).encode()


def keeps_packed(config: EngineConfig, ops: Ops) -> tuple[bool, str]:
    """Return whether quantized weights stay packed in memory, and why it is so."""
    if config.precision == "none":
        return False, "precision='none' expands them"
    return packed_product(ops)


def _contexts(
    classes: Sequence[KVClass], transformer: Transformer, source: WeightSource, tokenizer: Tokenizer
) -> tuple[KeyContext, ...]:
    """Return per KV class everything that its blocks' bytes depend on beside tokens and tenant."""
    weights = f"{source.fingerprint} {transformer.dtype}".encode()
    if transformer.packed:
        weights += b" packed"
    if transformer.precision is not None:
        weights += b" map " + transformer.precision.fingerprint
    own = transformer.activations
    rounded = [] if own is None else [name for name in ("ends", "middle") if getattr(own, name) == "int8"]
    return tuple(
        KeyContext(
            weights=weights,
            tokenizer=tokenizer.version,
            kv_class=_described(one),
            rope=repr(transformer.spec.ropes).encode(),
            activation=" ".join(rounded).encode(),
        )
        for one in classes
    )
