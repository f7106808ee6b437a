"""A cut renumbers names and configuration, and what is gone is never touched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from tests.quantize.conftest import OWN, SIZES

from kimicore.kernels.registry import select_ops
from kimicore.model.load import open_source
from kimicore.model.modules import modules_of
from kimicore.model.skipping import LayerCut, WithoutLayers, without_layers
from kimicore.model.spec import spec_from_config
from kimicore.model.transformer import Transformer


@st.composite
def cuts(draw: st.DrawFn) -> LayerCut:
    layers = draw(st.integers(2, 12))
    skipped = draw(st.sets(st.integers(0, layers - 1), max_size=layers - 1))
    return LayerCut.of(layers, draw(st.permutations(sorted(skipped))))


@given(cuts())
def test_names_close_ranks(cut: LayerCut) -> None:
    """The names of kept layers become those of 0 to n - 1 in their order, and all others stay or go."""
    new = [cut.renamed(f"model.layers.{layer}.mlp.up_proj.weight") for layer in range(cut.layers)]
    assert [one for one in new if one is not None] == [
        f"model.layers.{at}.mlp.up_proj.weight" for at in range(len(cut.kept))
    ]
    assert tuple(at for at, one in enumerate(new) if one is None) == cut.skipped
    for name in ("model.embed_tokens.weight", "lm_head.weight", f"model.layers.{cut.layers}.x", "sublayers.0.x"):
        assert cut.renamed(name) == name


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    name = draw(st.sampled_from(["llama", "mistral", "qwen2", "qwen3", "gemma3_text"]))
    layers = draw(st.integers(2, 9))
    config = {"model_type": name, **SIZES, **OWN.get(name, {}), "num_hidden_layers": layers}
    if name in ("qwen2", "qwen3") and draw(st.booleans()):
        config |= {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": draw(st.integers(0, layers))}
    if name == "gemma3_text":
        config["sliding_window_pattern"] = draw(st.integers(1, 7))
    if name in ("qwen2", "qwen3", "gemma3_text") and draw(st.booleans()):
        kinds = ["full_attention", *(["sliding_attention"] if name == "gemma3_text" else [])]
        config["layer_types"] = draw(st.lists(st.sampled_from(kinds), min_size=layers, max_size=layers))
    return config


@given(configs(), st.data())
def test_a_cut_configuration_is_of_the_layers_that_are_left(config: dict[str, Any], data: st.DataObject) -> None:
    """Each kept layer has the window and the rope that it had, and the model is otherwise the same."""
    layers = config["num_hidden_layers"]
    cut = LayerCut.of(layers, data.draw(st.lists(st.integers(0, layers - 1), unique=True, max_size=layers - 1)))
    whole, found = spec_from_config(config), spec_from_config(cut.config(config))
    assert [one.window for one in found.layers] == [whole.layers[one].window for one in cut.kept]
    assert [found.ropes[one.rope] for one in found.layers] == [whole.ropes[whole.layers[one].rope] for one in cut.kept]
    same = {"layers": (), "ropes": ()}
    assert evolve(found, **same) == evolve(whole, **same)


class Watched:
    """A source that notes what is asked of it."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self.asked: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        self.asked.add(name)
        found: torch.Tensor = self._source.read(name, dtype)
        return found

    def packed(self, name: str) -> Any:
        self.asked.add(name)
        return self._source.packed(name)


@pytest.mark.parametrize("packed", [False, True])
def test_skipped_layers_are_never_read(packed: bool, layered: Callable[..., Path]) -> None:
    """Loading reads each tensor of the layers that are left, and none of the others."""
    source = Watched(open_source(layered("gemma3_text")))
    view = without_layers(source, [3, 0])
    ops = select_ops("cpu", torch.float32, native=False)
    model = Transformer.load(spec_from_config(view.config), view, ops, torch.float32, packed=packed)
    assert len(model.weights.layers) == 3
    assert source.asked == {
        name for name in source.names() if not name.startswith(("model.layers.3.", "model.layers.0."))
    }


def test_no_skips_leave_the_source_as_it_is(layered: Callable[..., Path]) -> None:
    """Without skips there is no view at all, so that fingerprints stay what they were."""
    source = open_source(layered("llama"))
    assert without_layers(source, ()) is source


@pytest.mark.parametrize("others", [[(0,), (1,), (0, 1), (1, 2)]])
def test_fingerprints_differ(others: Sequence[Sequence[int]], layered: Callable[..., Path]) -> None:
    """Each set of skipped layers has a fingerprint of its own, whatever order they are named in."""
    source = open_source(layered("llama"))
    found = {without_layers(source, one).fingerprint for one in [(), *others]}
    assert len(found) == 1 + len(others)
    assert without_layers(source, (2, 1)).fingerprint == without_layers(source, (1, 2)).fingerprint


def test_a_view_has_the_shapes_of_what_is_left(layered: Callable[..., Path]) -> None:
    """Names and shapes of the view are those that a model of so many layers needs."""
    view = without_layers(open_source(layered("qwen2")), (0, 4))
    assert isinstance(view, WithoutLayers)
    for one in modules_of(spec_from_config(view.config)):
        name = f"model.{one.name}" if one.name.endswith(".bias") else f"model.{one.name}.weight"
        if one.name != "lm_head":
            assert view.shape(name) == one.shape
            assert name in view.names()
    assert not any(".layers.3." in name for name in view.names())
