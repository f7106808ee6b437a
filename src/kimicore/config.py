"""The settings of an engine."""

from __future__ import annotations

from attrs import frozen

from kimicore.checks import boolean_field, byte_size_field, choice_field, float_field, int_field, name_field
from kimicore.errors import ConfigError

__all__ = ["EngineConfig"]


@frozen(slots=True)
class EngineConfig:
    """Settings of an :class:`~kimicore.Engine`; each is checked here and refused by name.

    ``dtype``: "auto" is bfloat16 where the processor multiplies it natively, else float32. Only float32
    promises the same tokens in every batch. ``device``: "auto" or "cpu". ``threads``: torch's thread count, set
    when the engine opens and restored when it closes; None leaves it alone.

    ``max_batch_size`` rows and ``max_batch_tokens`` tokens bound a step. ``min_batch_size`` and
    ``max_wait_s``: while other rows run, new prompts are held back until that many wait or the oldest has
    waited that long; an idle engine starts at once. ``target_step_s``: while streams
    are generating, chunks of prompts are sized so that a step takes about this long, or up to 1.8 times what the
    generating rows take alone where that is more. Nobody sees pauses within a ``generate``: beside those alone,
    chunks are as large as ``max_batch_tokens`` allows.

    ``max_waiting``: requests that may wait; one more is :class:`~kimicore.Overloaded`. A request waits until its first
    step is planned, also on an idle engine. ``context_tokens``:
    longest prompt plus output (None: the model's own limit, as far as the KV arena holds it; a value over
    either is refused when the engine opens).
    ``kv_device_bytes``: size of the KV arena, as a number or as text such as "2GiB" (None: 1 GiB, or what
    a quarter of the available memory allows). ``block_tokens``: tokens per KV block, 16, 32 or 64.
    ``prefix_cache``: keep computed prefixes for later requests of the same tenant.

    ``batching``, ``eviction``, ``padding``: policies by name. ``native_kernels``: False keeps to torch's
    own operations. ``shutdown_s``: how long closing waits for the running step.

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
    block_tokens: int = int_field(16, 16, 64, fault=ConfigError)
    prefix_cache: bool = boolean_field(True, fault=ConfigError)
    batching: str = name_field("fcfs", fault=ConfigError)
    eviction: str = name_field("lru", fault=ConfigError)
    padding: str = name_field("packed", fault=ConfigError)
    native_kernels: bool = boolean_field(True, fault=ConfigError)
    shutdown_s: float = float_field(10.0, 0.0, 3600.0, fault=ConfigError)

    def __attrs_post_init__(self) -> None:
        if self.block_tokens not in (16, 32, 64):
            raise ConfigError(f"block_tokens={self.block_tokens}: must be 16, 32 or 64")
        if self.max_batch_tokens < self.max_batch_size:
            raise ConfigError(
                f"max_batch_tokens={self.max_batch_tokens} is under max_batch_size={self.max_batch_size}: "
                "every running row needs a token per step; raise the first or lower the second"
            )
        if self.min_batch_size > self.max_batch_size:
            raise ConfigError(f"min_batch_size={self.min_batch_size} is over max_batch_size={self.max_batch_size}")
