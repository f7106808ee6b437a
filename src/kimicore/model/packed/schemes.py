"""What a folder's ``quantization_config`` says of each matrix.

Read are compressed-tensors, AWQ and GPTQ; every other method, and what in those would change the result, is refused by
its name. Regular expressions in a config are somebody else's: those that could run for very long are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from attrs import frozen

from kimicore.checks import integer
from kimicore.errors import ModelLoadError
from kimicore.model.mapped import fault

__all__ = ["Layout", "Scheme", "SchemeOf", "read_schemes"]

Layout = Literal["packed", "bytes", "awq", "gptq"]


@frozen
class Scheme:
    """How a matrix is quantized.

    ``bits`` of a code; ``group`` of inputs that share a scale, 0: a whole row, -1: the whole matrix. ``ordered``:
    groups are not of neighbours, and there must be a table of them. ``zeros_one_less``: zeros are stored so, as in
    GPTQ's first format.
    """

    layout: Layout
    bits: int
    group: int
    ordered: bool = False
    zeros_one_less: bool = False


SchemeOf = Callable[[Sequence[str]], Scheme | None]
"""The scheme of the module of these names, None where the config leaves it plain."""

_WHERE: Final = "quantization_config"
_MOST_PATTERN: Final = 300
_MOST_REPEATS: Final = 5


def read_schemes(path: Path, config: Mapping[str, Any]) -> tuple[frozenset[Layout], SchemeOf]:
    """Return the layouts that a quantization config speaks of, and what it says of a module.

    Raises :class:`~kimicore.ModelLoadError` that names the file, the field and what is not supported.
    """
    method = config.get("quant_method")
    if method is None and "config_groups" in config:
        method = "compressed-tensors"
    readers = {"compressed-tensors": _compressed_tensors, "awq": _awq, "gptq": _gptq}
    if not isinstance(method, str) or method not in readers:
        raise fault(
            path,
            _WHERE,
            f"{repr(method)[:60]} is not supported; supported are {', '.join(readers)}: use one of these, "
            "the plain weights or a GGUF file",
        )
    return readers[method](path, config)


def _field(path: Path, where: str, config: Mapping[str, Any], name: str, low: int, high: int) -> int:
    value = config.get(name)
    if value is None:
        raise fault(path, f"{where}.{name}", "is missing")
    try:
        return integer(f"{where}.{name}", value, low, high, ModelLoadError)
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error}") from None


def _bits(path: Path, config: Mapping[str, Any], allowed: Sequence[int]) -> int:
    bits = _field(path, _WHERE, config, "bits", 1, 64)
    if bits not in allowed:
        raise fault(path, f"{_WHERE}.bits", f"{bits} is not supported; supported are {', '.join(map(str, allowed))}")
    return bits


def _group(path: Path, where: str, config: Mapping[str, Any]) -> int:
    """Return the field "group_size", with 0 for whole rows."""
    group = _field(path, where, config, "group_size", -1, 1 << 24)
    if group == 0:
        raise fault(path, f"{where}.group_size", "is 0; it is a number of inputs, or -1 for whole rows")
    return max(group, 0)


def _form(config: Mapping[str, Any], *names: str, default: str) -> str:
    found = next((config[name] for name in names if config.get(name) is not None), default)
    return str(found).lower()


def _awq(path: Path, config: Mapping[str, Any]) -> tuple[frozenset[Layout], SchemeOf]:
    form = _form(config, "version", "format", default="gemm")
    if form != "gemm":
        raise fault(path, f"{_WHERE}.version", f"{form[:60]!r} of AWQ is not supported; supported is 'gemm'")
    scheme = Scheme("awq", _bits(path, config, (4,)), _group(path, _WHERE, config))
    return frozenset({"awq"}), lambda names: scheme


def _gptq(path: Path, config: Mapping[str, Any]) -> tuple[frozenset[Layout], SchemeOf]:
    form = _form(config, "checkpoint_format", "format", default="gptq")
    if form not in ("gptq", "gptq_v2"):
        raise fault(
            path, f"{_WHERE}.checkpoint_format", f"{form[:60]!r} of GPTQ is not supported; supported: gptq, gptq_v2"
        )

    def scheme(settings: Mapping[str, Any]) -> Scheme:
        bits, group = _bits(path, settings, (4, 8)), _group(path, _WHERE, settings)
        return Scheme("gptq", bits, group, bool(settings.get("desc_act")), form == "gptq")

    usual = scheme(config)
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise fault(path, f"{_WHERE}.dynamic", "must map patterns of modules to settings")
    rules: list[tuple[re.Pattern[str], Scheme | None]] = []
    for key, own in dynamic.items():
        pattern = _pattern(path, f"{_WHERE}.dynamic", key[2:] if key.startswith(("-:", "+:")) else key)
        if not isinstance(own, Mapping):
            raise fault(path, f"{_WHERE}.dynamic[{key[:60]!r}]", "must map settings to values")
        rules.append((pattern, None if key.startswith("-:") else scheme({**config, **own})))

    def of(names: Sequence[str]) -> Scheme | None:
        for pattern, found in rules:
            if any(pattern.match(name) for name in names):
                return found
        return usual

    return frozenset({"gptq"}), of


_FORMATS: Final[Mapping[str, Layout]] = {
    "pack-quantized": "packed",
    "int-quantized": "bytes",
    "naive-quantized": "bytes",
}
_REFUSED: Final = ("kv_cache_scheme", "sparsity_config", "transform_config")


def _compressed_tensors(path: Path, config: Mapping[str, Any]) -> tuple[frozenset[Layout], SchemeOf]:
    for name in _REFUSED:
        value = config.get(name)
        if value and not (isinstance(value, Mapping) and value.get("format") == "dense"):
            raise fault(path, f"{_WHERE}.{name}", f"{repr(value)[:60]} is not supported")
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise fault(path, f"{_WHERE}.config_groups", "must be an object with at least one group")
    ignored = _matchers(path, f"{_WHERE}.ignore", config.get("ignore") or [])
    rules: list[tuple[list[_Matcher], Scheme]] = []
    for name, group in groups.items():
        where = f"{_WHERE}.config_groups[{name[:60]!r}]"
        if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
            raise fault(path, where, "must be an object with the field 'weights'; other groups are not supported")
        scheme = _group_scheme(path, where, group, str(group.get("format") or config.get("format")))
        rules.append((_matchers(path, f"{where}.targets", group.get("targets") or []), scheme))

    def of(names: Sequence[str]) -> Scheme | None:
        if any(matcher(name) for matcher in ignored for name in names):
            return None
        for kind in ("name", "pattern", "class"):  # the closest rule counts
            for matchers, scheme in rules:
                if any(one.kind == kind and one(name) for one in matchers for name in names):
                    return scheme
        return None

    return frozenset(scheme.layout for _, scheme in rules), of


def _group_scheme(path: Path, where: str, group: Mapping[str, Any], form: str) -> Scheme:
    if form not in _FORMATS:
        raise fault(path, f"{where}.format", f"{form[:60]!r} is not supported; supported are {', '.join(_FORMATS)}")
    inputs, weights = group.get("input_activations"), group["weights"]
    if group.get("output_activations") or (isinstance(inputs, Mapping) and inputs.get("dynamic") is not True):
        raise fault(path, where, "activations with scales of their own are not supported")
    if str(weights.get("type", "int")).lower() != "int" or weights.get("dynamic"):
        kind = f"{weights.get('num_bits')} bits of type {weights.get('type')!r}"
        raise fault(path, f"{where}.weights", f"{kind[:80]} are not supported; supported are integers")
    bits = _field(path, f"{where}.weights", weights, "num_bits", 1, 8)
    size = weights.get("group_size")
    strategy = weights.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    shared = {"tensor": -1, "channel": 0}
    if strategy not in (*shared, "group"):
        raise fault(
            path, f"{where}.weights.strategy", f"{repr(strategy)[:60]} is not supported; use group, channel or tensor"
        )
    share = shared[strategy] if strategy in shared else _group(path, f"{where}.weights", weights)
    return Scheme(_FORMATS[form], bits, share, weights.get("actorder") in ("group", "dynamic", True))


@frozen
class _Matcher:
    """A target of a config: a module's name, a pattern of names, or the class that the module has elsewhere."""

    text: str
    kind: Literal["name", "pattern", "class"]
    pattern: re.Pattern[str] | None = None

    def __call__(self, name: str) -> bool:
        if self.pattern is not None:
            return self.pattern.match(name) is not None
        if self.kind == "class":
            return self.text == ("Embedding" if name.endswith("embed_tokens") else "Linear")
        return self.text == name


def _matchers(path: Path, where: str, texts: Any) -> list[_Matcher]:
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise fault(path, where, "must be a list of names")
    found: list[_Matcher] = []
    for text in texts:
        if text.startswith("re:"):
            found.append(_Matcher(text, "pattern", _pattern(path, where, text[3:])))
        else:
            found.append(_Matcher(text, "class" if text in ("Linear", "Embedding") else "name"))
    return found


def _pattern(path: Path, where: str, text: str) -> re.Pattern[str]:
    """Return a pattern that cannot run for long: short, with few repeats and none of a group."""
    repeats = len(re.findall(r"[*+{]", text))
    if len(text) > _MOST_PATTERN or repeats > _MOST_REPEATS or re.search(r"\)[*+{]", text):
        raise fault(path, where, f"the pattern {text[:60]!r} is too long or repeats too much; name the modules instead")
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise fault(path, where, f"{text[:60]!r} is no pattern: {error}") from None
