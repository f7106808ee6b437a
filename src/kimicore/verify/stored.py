"""What lies in a model's files: its tensors by format, and the report beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attrs import frozen

from kimicore.errors import ConfigError
from kimicore.model.gguf import read_gguf
from kimicore.model.packed.parts import Coded
from kimicore.model.safetensors_source import SafetensorsSource
from kimicore.model.source import WeightSource
from kimicore.model.spec import spec_from_config
from kimicore.verify.report import REPORT_FILE, Report

__all__ = ["StoredFormat", "describe_model", "stored_formats"]

_LAYOUTS = {"packed": "pack-quantized", "bytes": "int-quantized", "awq": "AWQ", "gptq": "GPTQ"}
_TABLES = ("embed_tokens", "lm_head", "token_embd.", "output.weight")


@frozen
class StoredFormat:
    """The tensors of one format: how many there are, their bytes, and of these those of embedding and head.

    A quantized matrix of a folder counts as one tensor, with the bytes of its codes, scales and all else of it.
    """

    name: str
    tensors: int
    size_bytes: int
    table_bytes: int = 0


def stored_formats(source: WeightSource) -> tuple[StoredFormat, ...]:
    """Return the formats in a model's files, largest first: GGUF's and safetensors' own names, and quantized matrices
    of a folder by their layout, bits and groups.
    """
    found: dict[str, StoredFormat] = {}
    for name, kind, size in _tensors(source):
        before = found.get(kind, StoredFormat(kind, 0, 0))
        table = size if _is_table(name) else 0
        found[kind] = StoredFormat(kind, before.tensors + 1, before.size_bytes + size, before.table_bytes + table)
    return tuple(sorted(found.values(), key=lambda one: -one.size_bytes))


def _is_table(name: str) -> bool:
    return any(one in name for one in _TABLES[:3]) or name == _TABLES[3]


def _tensors(source: WeightSource) -> Iterator[tuple[str, str, int]]:
    """Yield name, format and bytes of each tensor; the headers were checked when the model was opened."""
    if not isinstance(source, SafetensorsSource):
        for name, info in read_gguf(source.path).tensors.items():
            yield name, info.type.name, info.size_bytes
        return
    left = dict(source.stored_tensors)
    for name, coded in source.coded.items():
        yield name, _scheme(coded), sum([left.pop(part).size_bytes for part in coded.parts.values()])
    for name, tensor in left.items():
        yield name, tensor.dtype, tensor.size_bytes


def _scheme(coded: Coded) -> str:
    """Return how a folder has quantized a matrix, such as "GPTQ, 4 bits in groups of 128, ordered"."""
    scheme = coded.scheme
    shared = {0: "in rows", -1: "with one scale"}.get(scheme.group, f"in groups of {scheme.group}")
    return f"{_LAYOUTS[scheme.layout]}, {scheme.bits} bits {shared}" + (", ordered" if scheme.ordered else "")


def describe_model(source: WeightSource) -> Iterator[tuple[str, str]]:
    """Yield lines (name, value): the architecture, the formats of the tensors, and the report beside the weights."""
    yield "model", str(source.path)
    yield "architecture", _architecture(source.config)
    formats = stored_formats(source)
    width = max([22, *(len(one.name) for one in formats)])
    for one in formats:
        yield "", f"  {one.name:{width}} {one.tensors} tensors, {_bytes(one.size_bytes, one.table_bytes)}"
    total, tables = sum(one.size_bytes for one in formats), sum(one.table_bytes for one in formats)
    yield "", f"  {'all':{width}} {sum(one.tensors for one in formats)} tensors, {_bytes(total, tables)}"
    yield from _report(source)


def _bytes(size: int, tables: int) -> str:
    rest = f", {size - tables:,} without embedding and head" if tables else ""
    return f"{size:,} bytes{rest}"


def _architecture(config: Mapping[str, Any]) -> str:
    spec = spec_from_config(config)
    heads = f"{spec.heads} heads over {spec.kv_heads} of keys and values"
    return (
        f"{spec.architecture}: {len(spec.layers)} layers of {spec.hidden_size} and {spec.intermediate_size}, {heads}, "
        f"{spec.vocab_size} tokens, {'tied' if spec.tied else 'a head of its own'}, context {spec.context_tokens}"
    )


def _report(source: WeightSource) -> Iterator[tuple[str, str]]:
    path = source.path / REPORT_FILE
    if not source.path.is_dir() or not path.exists():
        yield "verified", "no report beside the weights: run kimicore verify BASELINE MODEL"
        return
    try:
        report = Report.read(path)
    except ConfigError as error:
        yield "verified", str(error)
        return
    if report.candidate.fingerprint != source.fingerprint:
        yield "verified", f"{path.name} is of other weights: run kimicore verify again"
        return
    word = "pass" if report.passed else "FAIL"
    yield "verified", f"{word} against {report.baseline.model} on {report.prompts} prompts"
    for line in report.table().splitlines():
        yield "", f"  {line}"
