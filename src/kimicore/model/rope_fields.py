"""Reads a model's rotary position settings from its configuration, in every spelling that is in use."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, cast

from attrs import frozen

from kimicore.checks import integer, number
from kimicore.errors import ModelLoadError

__all__ = ["ROPE_KINDS", "RopeKind", "RopeSpec", "read_rope", "read_ropes_by_layer_type"]

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "factors"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "dynamic", "yarn", "llama3", "factors")

_MAX_TOKENS = 1 << 30
_MAX_FACTOR = 1e6
# Keys that say nothing about the frequencies of the kind that they stand beside.
_NEUTRAL = frozenset({"type", "rope_type", "rope_theta", "partial_rotary_factor", "finetuned"})
_KEYS: Mapping[str, frozenset[str]] = {
    "default": frozenset({"factor", "original_max_position_embeddings"}),
    "linear": frozenset({"factor", "original_max_position_embeddings"}),
    "dynamic": frozenset({"factor", "original_max_position_embeddings"}),
    "factors": frozenset({"factors"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}


@frozen
class RopeSpec:
    """One rotary embedding: its kind, base, head dimension and whatever its kind needs.

    ``trained_tokens`` is the model's ``max_position_embeddings``; ``original_tokens`` the context before
    scaling (yarn, llama3). ``attention_factor`` multiplies cos and sin. ``factors`` [D/2] divide the frequencies one
    by one (kind "factors": files that carry them as a tensor).
    """

    kind: RopeKind
    theta: float
    head_dim: int
    trained_tokens: int
    original_tokens: int
    factor: float = 1.0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    factors: tuple[float, ...] = ()


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ModelLoadError(f"{name}={value!r}: must be an object or null")
    return value


def _merged(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return rope_scaling and rope_parameters as one mapping; refuse it where they contradict each other."""
    scaling = _mapping("rope_scaling", config.get("rope_scaling"))
    parameters = _mapping("rope_parameters", config.get("rope_parameters"))
    for key in scaling.keys() & parameters.keys():
        if scaling[key] != parameters[key]:
            raise ModelLoadError(
                f"rope_scaling[{key!r}]={scaling[key]!r} contradicts rope_parameters[{key!r}]={parameters[key]!r}"
            )
    return {**parameters, **scaling}


def _kind(where: str, values: Mapping[str, Any]) -> RopeKind:
    spellings = {key: values[key] for key in ("rope_type", "type") if values.get(key) is not None}
    if len(set(map(str, spellings.values()))) > 1:
        raise ModelLoadError(f"{where}: rope_type={spellings['rope_type']!r} contradicts type={spellings['type']!r}")
    kind = next(iter(spellings.values()), None)
    if kind is None:
        if values.get("factor") is not None:
            raise ModelLoadError(f"{where}: factor={values['factor']!r} is given without a rope_type")
        return "default"
    if kind not in ROPE_KINDS:
        raise ModelLoadError(f"{where}: rope_type={kind!r} is not supported; supported are {', '.join(ROPE_KINDS)}")
    return cast(RopeKind, kind)


def _factor(where: str, name: str, values: Mapping[str, Any], default: float | None = None) -> float:
    value = values.get(name)
    if value is None:
        if default is None:
            raise ModelLoadError(f"{where}: {name} is missing")
        return default
    return number(f"{where}.{name}", value, 0.0, _MAX_FACTOR, ModelLoadError, above=True)


def _original_tokens(where: str, values: Mapping[str, Any], config: Mapping[str, Any], trained: int) -> int:
    # A top-level value wins, as in transformers: some models keep it outside of the rope settings.
    for owner, source in (("", config), (f"{where}.", values)):
        value = source.get("original_max_position_embeddings")
        if value is not None:
            return integer(f"{owner}original_max_position_embeddings", value, 1, _MAX_TOKENS, ModelLoadError)
    return trained


def _yarn(where: str, values: Mapping[str, Any], theta: float, trained: int, original: int) -> dict[str, Any]:
    if theta <= 1.0:
        raise ModelLoadError(f"rope_theta={theta!r}: yarn needs a base over 1")
    factor = _factor(where, "factor", values, trained / original)
    beta_fast, beta_slow = _factor(where, "beta_fast", values, 32.0), _factor(where, "beta_slow", values, 1.0)
    if beta_fast < beta_slow:
        raise ModelLoadError(f"{where}: beta_fast={beta_fast!r} is under beta_slow={beta_slow!r}")
    truncate = values.get("truncate", True)
    if not isinstance(truncate, bool):
        raise ModelLoadError(f"{where}.truncate={truncate!r}: must be true or false")
    scales = [values.get(name) for name in ("mscale", "mscale_all_dim")]
    if all(scales):
        top, bottom = (_factor(where, name, values) for name in ("mscale", "mscale_all_dim"))
        inferred = _magnitude(factor, top) / _magnitude(factor, bottom)
    else:
        inferred = _magnitude(factor, 1.0)
    return {
        "factor": factor,
        "beta_fast": beta_fast,
        "beta_slow": beta_slow,
        "truncate": truncate,
        "attention_factor": _factor(where, "attention_factor", values, inferred),
    }


def _magnitude(factor: float, mscale: float) -> float:
    """Return yarn's attention magnitude (Peng et al. 2023, arXiv:2309.00071, section 3.4)."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(where: str, values: Mapping[str, Any]) -> dict[str, Any]:
    names = ("factor", "low_freq_factor", "high_freq_factor")
    result = {name: _factor(where, name, values) for name in names}
    if result["high_freq_factor"] <= result["low_freq_factor"]:
        raise ModelLoadError(
            f"{where}: high_freq_factor={result['high_freq_factor']!r} must be over "
            f"low_freq_factor={result['low_freq_factor']!r}"
        )
    return result


def _factors(where: str, values: Mapping[str, Any], head_dim: int) -> tuple[float, ...]:
    given = values.get("factors")
    if not isinstance(given, (list, tuple)) or len(given) != head_dim // 2:
        count = len(given) if isinstance(given, (list, tuple)) else repr(given)
        raise ModelLoadError(f"{where}.factors has {count} entries, expected {head_dim // 2} (half of head_dim)")
    return tuple(
        number(f"{where}.factors[{i}]", value, 0.0, _MAX_FACTOR, ModelLoadError, above=True)
        for i, value in enumerate(given)
    )


def _parse(
    where: str, values: Mapping[str, Any], config: Mapping[str, Any], *, theta: Any, head_dim: int, trained: int
) -> RopeSpec:
    kind = _kind(where, values)
    for key, value in values.items():
        if isinstance(value, Mapping):
            raise ModelLoadError(f"{where}[{key!r}]: settings per layer type are not part of this architecture")
        if key not in _NEUTRAL | _KEYS[kind] and value is not None:
            raise ModelLoadError(f"{where}: {key}={value!r} is not known for rope_type={kind!r}")
    for owner, source in (("", config), (f"{where}.", values)):
        partial = source.get("partial_rotary_factor")
        if partial is not None and partial != 1.0:
            raise ModelLoadError(f"{owner}partial_rotary_factor={partial!r}: only 1.0 (whole heads) is supported")
    inner = values.get("rope_theta")
    base = number("rope_theta", theta if inner is None else inner, 0.0, 1e15, ModelLoadError, above=True)
    original = _original_tokens(where, values, config, trained)
    extra: dict[str, Any] = {}
    if kind == "yarn":
        extra = _yarn(where, values, base, trained, original)
    elif kind == "llama3":
        extra = _llama3(where, values)
    elif kind == "factors":
        extra = {"factors": _factors(where, values, head_dim)}
    elif kind in ("linear", "dynamic"):
        extra = {"factor": _factor(where, "factor", values)}
    elif values.get("factor") is not None:
        _factor(where, "factor", values)
    if kind == "dynamic" and head_dim <= 2:
        raise ModelLoadError(f"head_dim={head_dim}: dynamic rope needs a head dimension over 2")
    return RopeSpec(kind=kind, theta=base, head_dim=head_dim, trained_tokens=trained, original_tokens=original, **extra)


def read_rope(config: Mapping[str, Any], *, theta: float, head_dim: int, trained: int) -> RopeSpec:
    """Return the one rotary embedding of a model.

    Reads ``rope_theta`` and either ``rope_scaling`` or ``rope_parameters``, with the kind spelled ``type`` or
    ``rope_type``. ``theta`` is the architecture's own base, ``trained`` its trained context in tokens. Raises
    :class:`~kimicore.ModelLoadError` for an unknown kind, key or value; nothing falls back silently.
    """
    outer = config.get("rope_theta")
    where = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    return _parse(
        where, _merged(config), config, theta=theta if outer is None else outer, head_dim=head_dim, trained=trained
    )


def read_ropes_by_layer_type(
    config: Mapping[str, Any], *, full_theta: float, sliding_theta: float, head_dim: int, trained: int
) -> dict[str, RopeSpec]:
    """Return the rotary embeddings of ``full_attention`` and ``sliding_attention`` layers (Gemma 3).

    A flat ``rope_scaling`` concerns the full layers alone; sliding layers then have ``rope_local_base_freq``.
    """
    merged = _merged(config)
    nested = {key: merged.pop(key) for key in ("full_attention", "sliding_attention") if key in merged}
    full = {**_mapping("rope_parameters.full_attention", nested.get("full_attention")), **merged}
    sliding = dict(_mapping("rope_parameters.sliding_attention", nested.get("sliding_attention")))
    bases = {"full_attention": ("rope_theta", full_theta), "sliding_attention": ("rope_local_base_freq", sliding_theta)}
    result = {}
    for layer_type, values in (("full_attention", full), ("sliding_attention", sliding)):
        key, default = bases[layer_type]
        theta = config.get(key)
        result[layer_type] = _parse(
            f"rope_parameters.{layer_type}" if nested else "rope_scaling",
            values,
            config,
            theta=default if theta is None else theta,
            head_dim=head_dim,
            trained=trained,
        )
    return result
