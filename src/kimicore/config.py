"""The settings of an engine."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Self

from attrs import field, fields, frozen

from kimicore.checks import (
    boolean_field,
    byte_size_field,
    choice_field,
    float_field,
    int_field,
    integer,
    name_field,
    path_field,
)
from kimicore.errors import ConfigError
from kimicore.types import KV_PRECISIONS, KVPrecision

__all__ = ["EngineConfig", "check_budgets"]

_DOMAINS: dict[str, KVPrecision] = {"medical": "full", "legal": "full", "finance": "full"}
_POLICY_KINDS = ("batching", "eviction", "padding", "precision")
_NO_MAPS = ("stored", "none")


def check_budgets(max_batch_size: int, max_batch_tokens: int, min_batch_size: int) -> None:
    """Raise :class:`~kimicore.ConfigError` where the budgets of a step contradict each other."""
    if max_batch_tokens < max_batch_size:
        raise ConfigError(
            f"max_batch_tokens={max_batch_tokens} is under max_batch_size={max_batch_size}: "
            "every running row needs a token per step; raise the first or lower the second"
        )
    if min_batch_size > max_batch_size:
        raise ConfigError(f"min_batch_size={min_batch_size} is over max_batch_size={max_batch_size}")


def _policy_settings(value: Any) -> Mapping[str, Mapping[str, Any]]:
    """Return a copy of ``value``, a mapping from a kind of policy to its settings, or refuse it by name."""
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"policy={value!r}: must map a kind of policy to its settings, such as {{'eviction': {{...}}}}"
        )
    result: dict[str, Mapping[str, Any]] = {}
    for kind, settings in value.items():
        if kind not in _POLICY_KINDS:
            raise ConfigError(f"policy.{kind}: there is no such kind of policy; kinds are {', '.join(_POLICY_KINDS)}")
        if not isinstance(settings, Mapping) or not all(isinstance(key, str) for key in settings):
            raise ConfigError(f"policy.{kind}={settings!r}: must map names of settings to values")
        result[kind] = dict(settings)
    return result


def _precision(name: str, value: Any) -> KVPrecision:
    for one in KV_PRECISIONS:
        if isinstance(value, str) and value == one:
            return one
    raise ConfigError(f"{name}={value!r:.80}: must be one of {', '.join(KV_PRECISIONS)}")


def _kv_precisions(value: Any) -> tuple[KVPrecision, ...]:
    """Return names of precisions, or refuse the wrong one."""
    if isinstance(value, str):
        value = [one.strip() for one in value.split(",") if one.strip()]
    if not isinstance(value, Sequence) or isinstance(value, (bytes, bytearray)):
        raise ConfigError(f"kv_precisions={value!r:.80}: must be a list of precisions, such as ['int8']")
    return tuple([_precision(f"kv_precisions[{at}]", one) for at, one in enumerate(value)])


def _kv_domains(value: Any) -> Mapping[str, KVPrecision]:
    """Return a copy of ``value``, a mapping from domains to precisions, or refuse it by name."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) and key for key in value):
        raise ConfigError(
            f"kv_domains={value!r:.80}: must map names of domains to precisions, such as {{'chat': 'int8'}}"
        )
    return {key: _precision(f"kv_domains[{key!r:.80}]", one) for key, one in value.items()}


def _layers(value: Any) -> tuple[int, ...]:
    """Return numbers of layers, or refuse the wrong one; whether a model has so many is known when it is opened."""
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes, bytearray)):
        raise ConfigError(f"skip_layers={value!r:.80}: must be a list of layers, counted from 0, such as [11, 12]")
    found = tuple([integer(f"skip_layers[{at}]", one, 0, 4095, ConfigError) for at, one in enumerate(value)])
    if len(set(found)) < len(found):
        raise ConfigError(f"skip_layers={found!r:.80}: name each layer once")
    return found


@frozen(slots=True)
class EngineConfig:
    """Settings of an :class:`~kimicore.Engine`; each is checked here and refused by name.

    ``dtype``: "auto" is bfloat16 where the processor multiplies it natively, else float32. Only float32
    promises the same tokens in every batch. ``device``: "auto" or "cpu". ``threads``: torch's thread count, set
    when the engine opens and restored when it closes; None leaves it alone.

    ``precision``: of the weights. "stored": what a file has quantized stays as it is, packed in memory, and the rest
    has ``dtype``; "none": everything is expanded to ``dtype``; the name of a precision map ("asymmetric", "uniform",
    "custom", an installed one, "uniform-int4", "uniform-int8"): matrices are rounded as it says, to nearest, while they
    are loaded, with its settings in ``policy``. Where products with packed weights have no native version here,
    weights are expanded at load: values are the same, memory is not. ``activations``: of inputs to products with packed
    weights. "map": as the precision map says that was applied here, or with "stored" the one that ``kimicore quantize``
    left beside the weights; such maps may have 8 bits for the middle of a prompt. "16-bit": none is rounded.
    ``skip_layers``: layers by number, from 0, that the model is loaded without.

    ``max_batch_size`` rows and ``max_batch_tokens`` tokens bound a step. ``min_batch_size`` and
    ``max_wait_s``: while other rows run, new prompts are held back until that many wait or the oldest has
    waited that long; an idle engine starts at once. ``target_step_s``: while streams
    are generating, chunks of prompts are sized so that a step takes about this long, or up to 1.9 times what the
    generating rows take alone where that is more. Nobody sees pauses within a ``generate``: beside those alone,
    chunks are as large as ``max_batch_tokens`` allows.

    ``max_waiting``: requests that may wait; one more is :class:`~kimicore.Overloaded`. A request waits until its first
    step is planned, also on an idle engine. ``context_tokens``:
    longest prompt plus output (None: the model's own limit, as far as the KV arena holds it; a value over
    either is refused when the engine opens).
    ``kv_device_bytes``: size of the KV arena, as a number or as text such as "2GiB" (None: 1 GiB, or what
    a quarter of the available memory allows). ``block_tokens``: tokens per KV block, 16, 32 or 64.
    ``prefix_cache``: keep computed prefixes for later requests of the same tenant.

    ``kv_host_bytes``: size of a second tier of the KV cache in host memory (None or 0: none; on a CPU it lies in the
    same memory as the first). ``kv_disk_dir``: a folder for a third one, which outlives the engine; one engine uses it
    at a time, and only its owner may read it. ``kv_disk_bytes``: bytes that it may take there (None: 8 GiB, or half of
    what the disk has free where that is less). ``kv_disk_uses``: uses of a block before it is written there; most
    blocks are used once. ``io_threads``: readers of the disk.

    ``kv_precision``: of the KV of requests that say nothing else: "full" (the model's own), "int8" or "int4", which
    take about half and a third of the memory and change what is generated a little. ``kv_domains``: precisions by a
    request's domain, added to medical, legal and finance, whose KV is kept in full. ``kv_precisions``: others that
    requests may ask for. ``sparse_decode``: keep a summary of every block's keys (1/``block_tokens`` more memory), so
    that requests may ask for sparse decoding.

    ``importance``: what an eviction policy that asks for it is told of the attention that blocks get. "off": nothing;
    "table": a value by a block's place in its sequence, from the table that ``kimicore warmup`` writes
    (``importance_table``: its file, None: the model's in the cache folder); "attention": what a request's last queries
    gave them, measured at the end of its prompt and in every ``importance_every``-th step, and the table's values
    before that where there is one.

    ``batching``, ``eviction``, ``padding``: policies by name; ``policy`` holds their own settings, such as
    ``{"eviction": {"half_life_s": 300}}``. A policy that raises or breaks a promise, or an installed one whose call
    takes longer than ``policy_limit_s``, is replaced by the default for that step, and for good after
    ``policy_fault_limit`` faults. ``native_kernels``: False keeps to torch's own operations. ``shutdown_s``: how long
    closing waits for the running step.

    Raises :class:`~kimicore.ConfigError`.
    """

    dtype: str = choice_field("auto", ("auto", "float32", "bfloat16", "float16"), fault=ConfigError)
    device: str = choice_field("auto", ("auto", "cpu"), fault=ConfigError)
    threads: int | None = int_field(None, 1, 1024, fault=ConfigError, optional=True)
    max_batch_size: int = int_field(64, 1, 65536, fault=ConfigError)
    max_batch_tokens: int = int_field(512, 1, 1 << 20, fault=ConfigError)
    min_batch_size: int = int_field(1, 1, 65536, fault=ConfigError)
    max_wait_s: float = float_field(0.05, 0.0, 3600.0, fault=ConfigError)
    target_step_s: float = float_field(0.05, 0.0, 3600.0, fault=ConfigError, above=True)
    max_waiting: int = int_field(4096, 1, 1 << 24, fault=ConfigError)
    context_tokens: int | None = int_field(None, 1, 1 << 30, fault=ConfigError, optional=True)
    kv_device_bytes: int | None = byte_size_field(fault=ConfigError)
    kv_host_bytes: int | None = byte_size_field(fault=ConfigError)
    kv_disk_dir: str | None = path_field(fault=ConfigError)
    kv_disk_bytes: int | None = byte_size_field(fault=ConfigError)
    kv_disk_uses: int = int_field(2, 1, 1 << 30, fault=ConfigError)
    io_threads: int = int_field(2, 1, 64, fault=ConfigError)
    block_tokens: int = int_field(16, 16, 64, fault=ConfigError)
    kv_precision: KVPrecision = choice_field("full", KV_PRECISIONS, fault=ConfigError)
    kv_precisions: tuple[KVPrecision, ...] = field(default=(), kw_only=True, converter=_kv_precisions)
    kv_domains: Mapping[str, KVPrecision] = field(default={}, kw_only=True, converter=_kv_domains, hash=False)
    sparse_decode: bool = boolean_field(False, fault=ConfigError)
    prefix_cache: bool = boolean_field(True, fault=ConfigError)
    batching: str = name_field("fcfs", fault=ConfigError)
    eviction: str = name_field("lru", fault=ConfigError)
    padding: str = name_field("packed", fault=ConfigError)
    importance: str = choice_field("off", ("off", "table", "attention"), fault=ConfigError)
    importance_every: int = int_field(8, 1, 1 << 20, fault=ConfigError)
    importance_table: str | None = path_field(fault=ConfigError)
    policy: Mapping[str, Mapping[str, Any]] = field(default={}, kw_only=True, converter=_policy_settings, hash=False)
    policy_limit_s: float = float_field(0.1, 0.0, 3600.0, fault=ConfigError, above=True)
    policy_fault_limit: int = int_field(16, 1, 1 << 30, fault=ConfigError)
    native_kernels: bool = boolean_field(True, fault=ConfigError)
    shutdown_s: float = float_field(10.0, 0.0, 3600.0, fault=ConfigError)
    precision: str = name_field("stored", fault=ConfigError)
    activations: str = choice_field("map", ("map", "16-bit"), fault=ConfigError)
    skip_layers: tuple[int, ...] = field(default=(), kw_only=True, converter=_layers)

    def __attrs_post_init__(self) -> None:
        if self.block_tokens not in (16, 32, 64):
            raise ConfigError(f"block_tokens={self.block_tokens}: must be 16, 32 or 64")
        if self.kv_disk_bytes is not None and self.kv_disk_dir is None:
            raise ConfigError(f"kv_disk_bytes={self.kv_disk_bytes}: set kv_disk_dir to the folder that is to hold them")
        if not self.prefix_cache and (self.kv_host_bytes or self.kv_disk_dir is not None):
            raise ConfigError("prefix_cache=False: kv_host_bytes and kv_disk_dir keep cached prefixes; leave one out")
        if not self.prefix_cache and self.importance != "off":
            raise ConfigError(
                f"prefix_cache=False: importance={self.importance!r} is of cached prefixes; leave one out"
            )
        if self.precision in _NO_MAPS and "precision" in self.policy:
            raise ConfigError(
                f"precision={self.precision!r}: has no settings; leave policy.precision out, or name a precision map"
            )
        check_budgets(self.max_batch_size, self.max_batch_tokens, self.min_batch_size)

    @property
    def domains(self) -> dict[str, KVPrecision]:
        """The precision of the KV of requests, by their domain."""
        return {**_DOMAINS, **self.kv_domains}

    @property
    def precisions(self) -> tuple[KVPrecision, ...]:
        """The precisions that requests' KV may have, full first."""
        named = {"full", self.kv_precision, *self.kv_domains.values(), *self.kv_precisions}
        return tuple([one for one in KV_PRECISIONS if one in named])

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> Self:
        """Return the settings of a TOML file, whose top-level keys are the fields' names.

        A policy's own settings stand in tables such as ``[policy.eviction]``. Raises :class:`~kimicore.ConfigError`,
        which names the file, for one that cannot be read, for keys that are no settings, and for wrong values.
        """
        where = os.fspath(path)
        try:
            with open(path, "rb") as file:
                data = tomllib.load(file)
        except OSError as error:
            raise ConfigError(f"{where}: cannot be read: {error.strerror or error}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where}: is not TOML: {error}") from error
        names = [one.name for one in fields(cls)]
        for key in data:
            if key not in names:
                near = get_close_matches(key, names, 1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; settings are {', '.join(names)}"
                raise ConfigError(f"{where}: {key!r} is no setting{hint}")
        try:
            return cls(**data)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
