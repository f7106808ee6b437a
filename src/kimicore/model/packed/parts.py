"""Which tensors of a folder are parts of which quantized matrix; none is ever taken for something else or left over."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from attrs import field, frozen
from torch import Tensor

from kimicore.model.mapped import fault
from kimicore.model.packed.schemes import Layout, Scheme, SchemeOf, read_schemes
from kimicore.model.packed.words import spaced_words, stream_words
from kimicore.model.safetensors_header import StoredTensor

__all__ = ["Coded", "find_coded"]

_PARTS: Final[Mapping[Layout, Mapping[str, bool]]] = {
    "packed": {
        "weight_packed": True,
        "weight_scale": True,
        "weight_shape": True,
        "weight_zero_point": False,
        "weight_g_idx": False,
    },
    "bytes": {"weight": True, "weight_scale": True, "weight_zero_point": False},
    "awq": {"qweight": True, "qzeros": True, "scales": True},
    "gptq": {"qweight": True, "qzeros": True, "scales": True, "g_idx": False},
}
"""By layout the last words of its tensors' names, and whether each must be there."""
_ORDERS: Final = ("weight_g_idx", "g_idx")
_INTEGERS: Final = ("I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64")
_SCALES: Final = ("F16", "BF16", "F32")
_SHOWN: Final = 4
_GROUP_STEP: Final = 16


@frozen
class Coded:
    """A quantized matrix [O, C] of a folder: its scheme and the names of its parts by their last words.

    ``streamed``: codes follow each other bit by bit; older releases of compressed-tensors let none lie in two words.
    """

    name: str
    shape: tuple[int, int]
    scheme: Scheme
    parts: Mapping[str, str] = field(repr=False)
    streamed: bool = True

    @property
    def zero_words(self) -> int:
        """How many words a group's packed zeros take."""
        words = stream_words if self.streamed else spaced_words
        return words(self.shape[0], self.scheme.bits)

    @property
    def group(self) -> int:
        """How many neighbours of a row share a scale."""
        depth = self.shape[1]
        return min(self.scheme.group, depth) if self.scheme.group > 0 else depth

    @property
    def groups(self) -> int:
        """How many groups a row has."""
        return -(-self.shape[1] // self.group)


def find_coded(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, StoredTensor],
    stored_names: Mapping[str, str],
    load: Callable[[str], Tensor],
) -> tuple[dict[str, Coded], set[str]]:
    """Return a folder's quantized matrices by the names of their weights, and the names of all their parts.

    ``tensors``: by name. ``stored_names``: as the files have them, which the config may mean. ``load``: reads one of
    those that say a shape. Raises :class:`~kimicore.ModelLoadError` that names the tensors for parts that are missing,
    belong to no matrix, or have another shape or type than the config says.
    """
    layouts, scheme_of = read_schemes(path, config)
    words = {word for layout in layouts for word in _PARTS[layout]}
    modules: dict[str, dict[str, str]] = defaultdict(dict)
    for name, tensor in tensors.items():
        stem, _, word = name.rpartition(".")
        if word in words and (word != "weight" or tensor.dtype in _INTEGERS):
            modules[stem][word] = name
    found: dict[str, Coded] = {}
    for stem, parts in modules.items():
        some = next(iter(parts.values()))
        stored = stored_names[some].rpartition(".")[0]
        coded = _coded(path, stem, parts, _scheme(path, scheme_of, (stem, stored), parts), tensors, load)
        found[coded.name] = coded
    doubled = [name for name in found if name in tensors and name not in modules[name.rpartition(".")[0]].values()]
    if doubled:
        raise fault(path.parent, _listed(doubled), "is there as floats and quantized; one of the two is a mistake")
    return found, {name for parts in modules.values() for name in parts.values()}


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"tensor {', '.join([repr(name[:200]) for name in sorted(names)[:_SHOWN]])}{more}"


def _scheme(path: Path, scheme_of: SchemeOf, names: Sequence[str], parts: Mapping[str, str]) -> Scheme:
    scheme = scheme_of(names)
    if scheme is None:
        raise fault(
            path, "quantization_config", f"leaves {names[0][:200]!r} plain, but there are {_listed([*parts.values()])}"
        )
    return scheme


def _coded(
    path: Path,
    stem: str,
    parts: Mapping[str, str],
    scheme: Scheme,
    tensors: Mapping[str, StoredTensor],
    load: Callable[[str], Tensor],
) -> Coded:
    folder, wanted = path.parent, _PARTS[scheme.layout]
    missing = [f"{stem}.{word}" for word, must in wanted.items() if must and word not in parts]
    missing += [f"{stem}.{word}" for word in _ORDERS if scheme.ordered and word in wanted and word not in parts]
    if missing:
        raise fault(folder, _listed(missing), f"is missing, though there are {_listed([*parts.values()])}")
    foreign = [name for word, name in parts.items() if word not in wanted]
    if foreign:
        raise fault(folder, _listed(foreign), "is not used: the config gives this matrix another format")
    own = {word: tensors[name] for word, name in parts.items()}
    shape = _shape(folder, parts, own, scheme, load)
    if 0 in shape:
        raise fault(folder, _listed([*parts.values()]), f"are of a matrix {list(shape)}, which is empty")
    streamed = "weight_packed" not in own or own["weight_packed"].shape[1] == stream_words(shape[1], scheme.bits)
    coded = Coded(f"{stem}.weight", shape, scheme, dict(parts), streamed)
    if coded.group != shape[1] and coded.group % _GROUP_STEP:
        raise fault(path, "group_size", f"{coded.group} is not supported; groups are multiples of {_GROUP_STEP}")
    for word, tensor in own.items():
        _check(folder, parts[word], word, tensor, coded)
    return coded


def _shape(
    folder: Path,
    parts: Mapping[str, str],
    own: Mapping[str, StoredTensor],
    scheme: Scheme,
    load: Callable[[str], Tensor],
) -> tuple[int, int]:
    """Return the matrix's shape as the largest of its parts, or the one made for it, tells it."""
    main = "qweight" if "qweight" in own else "weight_packed" if "weight_packed" in own else "weight"
    dims = own[main].shape
    if len(dims) != 2:
        raise fault(folder, _listed([parts[main]]), f"has shape {list(dims)}, expected a matrix")
    each = 32 // scheme.bits
    if scheme.layout == "awq":
        return dims[1] * each, dims[0]
    if scheme.layout == "gptq":
        return dims[1], dims[0] * each
    if scheme.layout == "bytes":
        return dims[0], dims[1]
    said = own["weight_shape"]
    if said.shape != (2,) or said.dtype not in ("I64", "I32"):
        raise fault(folder, _listed([parts["weight_shape"]]), f"is {said.dtype} {list(said.shape)}, expected I64 [2]")
    outs, depth = [int(size) for size in load(parts["weight_shape"]).tolist()]
    fits = depth > 0 and dims[1] in (stream_words(depth, scheme.bits), spaced_words(depth, scheme.bits))
    if outs != dims[0] or not fits:
        raise fault(
            folder,
            _listed([parts["weight_shape"]]),
            f"says {[outs, depth]}, but {parts[main]!r} is {list(dims)}, in {scheme.bits} bits each",
        )
    return outs, depth


def _check(folder: Path, name: str, word: str, tensor: StoredTensor, coded: Coded) -> None:
    """Refuse a part of another type or shape than its matrix gives it."""
    (outs, depth), groups, bits = coded.shape, coded.groups, coded.scheme.bits
    each = 32 // bits
    by_row: list[tuple[int, ...]] = [(outs, groups)]
    if coded.scheme.group < 0:
        by_row = [(), (1,), (1, 1)]
    elif groups == 1:
        by_row.append((outs,))
    allowed: dict[str, tuple[tuple[str, ...], list[tuple[int, ...]]]] = {
        "scales": (_SCALES, [(groups, outs)]),
        "qzeros": (("I32",), [(groups, outs // each)]),
        "g_idx": (("I32", "I64"), [(depth,)]),
        "weight_g_idx": (("I32", "I64"), [(depth,)]),
        "weight_scale": (_SCALES, by_row),
        "weight": (("I8",), [coded.shape]),
        "qweight": (("I32",), [tensor.shape]),
        "weight_packed": (("I32",), [tensor.shape]),
        "weight_shape": (("I32", "I64"), [(2,)]),
    }
    if word == "weight_zero_point":
        packed = coded.scheme.layout == "packed" and tensor.dtype == "I32" and coded.scheme.group >= 0
        allowed[word] = (("I32",), [(coded.zero_words, groups)]) if packed else (("I8",), by_row)
    types, shapes = allowed[word]
    if tensor.dtype not in types or tensor.shape not in shapes:
        expected = f"{' or '.join(types)} {' or '.join([str(list(shape)) for shape in dict.fromkeys(shapes)])}"
        raise fault(folder, f"tensor {name[:200]!r}", f"is {tensor.dtype} {list(tensor.shape)}, expected {expected}")
    if coded.scheme.layout in ("awq", "gptq") and outs % each:
        raise fault(folder, f"tensor {name[:200]!r}", f"{outs} outputs do not fill words of {each}")
