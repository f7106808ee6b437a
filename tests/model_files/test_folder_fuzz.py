"""Whatever a folder says of its quantization, opening and reading it gives matrices or a ModelLoadError."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from kimicore.errors import ModelLoadError
from kimicore.model.load import open_source

from .coded import KINDS, config_as, written_as
from .test_folder_formats import NAME, folder_of

WRITTEN = {kind: written_as(kind, torch.randn((32, 64), generator=torch.Generator().manual_seed(1))) for kind in KINDS}
DTYPES = (torch.float32, torch.float16, torch.int32, torch.int8, torch.int64, torch.uint8, torch.bool)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(max_size=8)
    | st.sampled_from(["group", "channel", "tensor", "gptq", "awq", "pack-quantized", "int-quantized", "re:.*"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON tree."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path, *(one for key, value in inner for one in places(value, (*path, key)))]


def survives(tensors: dict[str, torch.Tensor], config: Any) -> None:
    """Open a folder and read all of it, packed and plain."""
    with tempfile.TemporaryDirectory() as path:
        message = path
        try:
            source = open_source(folder_of(Path(path), tensors, config))
            for name in source.names():
                packed, plain = source.packed(name), source.read(name, torch.float32)
                assert packed is None or packed.shape == tuple(plain.shape) == source.shape(name)
        except ModelLoadError as error:
            message = str(error)
        assert path in message


@given(st.sampled_from(KINDS), st.data(), JSON)
def test_any_word_of_a_config_changed(kind: str, data: st.DataObject, value: Any) -> None:
    """Any value in a quantization config replaced by any other gives matrices or a load error that names the file."""
    config = copy.deepcopy(config_as(kind))
    place = data.draw(st.sampled_from(places(config)))
    if place:
        tree = config
        for key in place[:-1]:
            tree = tree[key]
        tree[place[-1]] = value
    else:
        config = value
    survives({f"{NAME}.{word}": part for word, part in WRITTEN[kind].parts.items()}, config)


SHAPES = st.lists(st.integers(0, 70), max_size=3)


@given(st.sampled_from(KINDS), st.data(), SHAPES, st.sampled_from(DTYPES), st.integers(-3, 130))
def test_any_part_changed(kind: str, data: st.DataObject, shape: list[int], dtype: torch.dtype, fill: int) -> None:
    """A part of any other shape, type and content gives matrices or a load error."""
    parts = dict(WRITTEN[kind].parts)
    word = data.draw(st.sampled_from(sorted(parts)))
    if data.draw(st.booleans()):
        shape = list(parts[word].shape)
    parts[word] = torch.full(shape, fill).to(dtype)
    survives({f"{NAME}.{name}": part for name, part in parts.items()}, config_as(kind))


@given(st.sampled_from(KINDS), st.sampled_from(KINDS), st.sets(st.integers(0, 9)))
def test_parts_of_one_format_under_the_config_of_another(written: str, said: str, dropped: set[int]) -> None:
    """Parts of one format, some of them lost, under the config of another give matrices or a load error."""
    parts = [one for index, one in enumerate(sorted(WRITTEN[written].parts.items())) if index not in dropped]
    survives({f"{NAME}.{word}": part for word, part in [*parts, ("bias", torch.ones(32))]}, config_as(said))
