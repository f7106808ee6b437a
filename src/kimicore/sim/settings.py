"""What a simulation is told: the engine's own settings, the time of steps, and what counts as good."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import Factory, field, frozen

from kimicore.checks import boolean_field, float_field, int_field, name_field, number
from kimicore.config import check_budgets
from kimicore.contracts import StepLimits
from kimicore.errors import ConfigError
from kimicore.plugins import KINDS
from kimicore.sim.cost import StepTimes
from kimicore.types import TIERS

__all__ = ["DEFAULT_TTFT_S", "SimConfig"]

DEFAULT_TTFT_S: Mapping[str, float] = {"interactive": 1.0, "standard": 5.0, "background": 60.0}
_POLICIES = ("batching", "eviction", "padding")


def _targets(value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"ttft_s={value!r}: must map tiers ({', '.join(TIERS)}) to seconds")
    for name in value:
        if name not in TIERS:
            raise ConfigError(f"ttft_s: there is no tier {name!r}; tiers are {', '.join(TIERS)}")
    given = {name: number(f"ttft_s[{name!r}]", v, 0.0, 1e9, ConfigError, above=True) for name, v in value.items()}
    return {**DEFAULT_TTFT_S, **given}


def _policy(value: Any) -> dict[str, dict[str, Any]]:
    kinds = [kind for kind in KINDS if kind in _POLICIES]
    if not isinstance(value, Mapping) or not all(isinstance(one, Mapping) for one in value.values()):
        raise ConfigError(f"policy={value!r}: must map kinds ({', '.join(kinds)}) to mappings of settings")
    for kind in value:
        if kind not in kinds:
            raise ConfigError(f"policy: there is no kind {kind!r} in a simulation; kinds are {', '.join(kinds)}")
    return {kind: dict(settings) for kind, settings in value.items()}


@frozen(kw_only=True)
class SimConfig:
    """Settings of a simulation; each is checked here and refused by name.

    ``batching`` to ``max_waiting`` are those of :class:`~kimicore.EngineConfig`; ``policy`` holds settings of the
    policies, by kind and field. ``kv_blocks`` of ``block_tokens`` tokens each are the KV arena. ``times``: how long
    steps take. ``streamed``: every request is read as it comes, so that chunks beside it are kept short. ``leap``:
    steps in which nothing can change are advanced together; the result is the same. ``seed``: goes to the eviction
    policy.

    ``ttft_s``: by tier, within which time a request should have its first token; tiers that are left out have
    :data:`DEFAULT_TTFT_S`. ``tpot_s``: the most that its later tokens may take on average.

    Raises :class:`~kimicore.ConfigError`.
    """

    batching: str = name_field("fcfs", fault=ConfigError)
    eviction: str = name_field("lru", fault=ConfigError)
    padding: str = name_field("packed", fault=ConfigError)
    policy: Mapping[str, Mapping[str, Any]] = field(default=Factory(dict), converter=_policy)
    max_batch_size: int = int_field(64, 1, 65536, fault=ConfigError)
    max_batch_tokens: int = int_field(2048, 1, 1 << 20, fault=ConfigError)
    min_batch_size: int = int_field(1, 1, 65536, fault=ConfigError)
    max_wait_s: float = float_field(0.05, 0.0, 3600.0, fault=ConfigError)
    target_step_s: float = float_field(0.05, 0.0, 3600.0, fault=ConfigError, above=True)
    max_waiting: int = int_field(4096, 1, 1 << 24, fault=ConfigError)
    kv_blocks: int = int_field(2048, 1, 1 << 26, fault=ConfigError)
    block_tokens: int = int_field(256, 1, 1 << 16, fault=ConfigError)
    times: StepTimes = field(default=Factory(StepTimes))
    streamed: bool = boolean_field(True, fault=ConfigError)
    leap: bool = boolean_field(True, fault=ConfigError)
    seed: int = int_field(0, 0, (1 << 64) - 1, fault=ConfigError)
    ttft_s: Mapping[str, float] = field(default=Factory(dict), converter=_targets)
    tpot_s: float = float_field(0.1, 0.0, 1e9, fault=ConfigError, above=True)

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.times, StepTimes):
            raise ConfigError(f"times={self.times!r}: must be StepTimes")
        check_budgets(self.max_batch_size, self.max_batch_tokens, self.min_batch_size)

    @property
    def limits(self) -> StepLimits:
        """The budgets of a step."""
        return StepLimits(
            max_batch_size=self.max_batch_size,
            max_batch_tokens=self.max_batch_tokens,
            min_batch_size=self.min_batch_size,
            max_wait_s=self.max_wait_s,
            target_step_s=self.target_step_s,
        )

    def settings_of(self, kind: str) -> Mapping[str, Any]:
        """Return the settings of the policy of ``kind``."""
        return self.policy.get(kind, {})
