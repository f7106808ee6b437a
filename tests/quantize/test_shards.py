"""The files that a model is written into: none too large, no tensor lost, and an index where there are several."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests.quantize.test_folder import quantized

from kimicore.model.load import open_source
from kimicore.quantize import files
from kimicore.quantize.files import write_safetensors, write_shards


@given(st.lists(st.integers(0, 60), min_size=1, max_size=30), st.integers(1, 100))
def test_every_tensor_is_in_one_file(lengths: list[int], most: int) -> None:
    """Whatever the sizes: tensors keep their order, files stay under the limit but for one tensor alone, and a model in
    several files can be read through its index."""
    sizes = {f"t{at}": 4 * length for at, length in enumerate(lengths)}
    tensors = {f"t{at}": torch.full((length,), float(at)) for at, length in enumerate(lengths)}
    seen: list[tuple[str, list[str]]] = []

    def write(path: Path, names: list[str]) -> None:
        seen.append((path.name, names))
        write_safetensors(path, {name: tensors[name] for name in names})

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as place:
        patch.setattr(files, "_SHARD_BYTES", 4 * most)
        folder = Path(place)
        write_shards(folder, sizes, write)
        assert [name for _, names in seen for name in names] == list(sizes)
        for _, names in seen:
            assert names
            assert len(names) == 1 or sum(sizes[name] for name in names) <= 4 * most
        found = sorted(one.name for one in folder.iterdir())
        if len(seen) == 1:
            assert found == ["model.safetensors"]
            return
        count = len(seen)
        assert [name for name, _ in seen] == [f"model-{at:05}-of-{count:05}.safetensors" for at in range(1, count + 1)]
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(sizes.values())
        assert index["weight_map"] == {name: file for file, names in seen for name in names}
        assert found == sorted([*(name for name, _ in seen), "model.safetensors.index.json"])
        for file, names in seen:
            assert load_file(folder / file).keys() == set(names)


def test_files_are_as_few_as_their_order_allows(tmp_path: Path) -> None:
    """A file is full before the next one begins."""
    seen: list[list[str]] = []
    sizes = dict.fromkeys("abcdefg", 1 << 30)
    write_shards(tmp_path, sizes, lambda path, names: seen.append(names))
    assert seen == [["a", "b"], ["c", "d"], ["e", "f"], ["g"]]


def test_a_quantized_folder_of_several_files(
    family: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ``kimicore quantize`` writes in several files has the tensors that it has in one."""
    source = family("llama", attention_bias=False, mlp_bias=False)
    whole = quantized(source, tmp_path / "whole", method="nearest").folder
    monkeypatch.setattr(files, "_SHARD_BYTES", 60_000)
    parts = quantized(source, tmp_path / "parts", method="nearest").folder
    shards = sorted(parts.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert max(one.stat().st_size for one in shards[1:]) < 80_000
    together = {name: tensor for one in shards for name, tensor in load_file(one).items()}
    alone = load_file(whole / "model.safetensors")
    assert together.keys() == alone.keys()
    assert all(torch.equal(together[name], tensor) for name, tensor in alone.items())
    opened, other = open_source(parts), open_source(whole)
    assert sorted(opened.names()) == sorted(other.names())
