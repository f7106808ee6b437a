"""Runs in a series: what would come out the same is taken from the run before, to the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.quantize.test_folder import SMALL, resolved
from tests.quantize.test_runs import Stop, content, stop_after

from kimicore.policies.precision import ResolvedMap
from kimicore.quantize import run
from kimicore.quantize.methods import QuantizeSettings
from kimicore.quantize.reuse import EarlierLayers
from kimicore.quantize.run import Quantized, quantize_model

LAYERS = 3


def changed(found: ResolvedMap, precisions: dict[str, str]) -> ResolvedMap:
    modules = [evolve(one, precision=precisions.get(one.module.name, one.precision)) for one in found.modules]
    return evolve(found, modules=tuple(modules))


class Series:
    """Runs one after another, each beside a run of the same map that is given nothing."""

    def __init__(self, source: Path, folder: Path, method: str) -> None:
        self.source, self.folder = source, folder
        self.settings = QuantizeSettings(method=method, **SMALL)
        self.earlier = EarlierLayers(folder / "layers")

    def run(self, found: ResolvedMap, **given: Any) -> Quantized:
        return quantize_model(
            self.source, self.folder / "out", found, self.settings, overwrite=True, earlier=self.earlier, **given
        )

    def check(self, found: ResolvedMap) -> Quantized:
        """Run, and compare with a run of its own."""
        made = self.run(found)
        alone = quantize_model(self.source, self.folder / "alone", found, self.settings, overwrite=True)
        assert content(made.folder) == content(alone.folder)
        assert made.weight_bytes == alone.weight_bytes
        assert not (self.folder / "out.partial").exists()
        return made


@pytest.fixture
def series(family: Callable[..., Path], tmp_path: Path) -> Callable[[str], Series]:
    source = family("qwen3")
    return lambda method: Series(source, tmp_path, method)


def base(one: Series) -> ResolvedMap:
    return resolved(one.source, "asymmetric", {"ffn": "int4-g32"})


@pytest.mark.parametrize("method", ["awq", "gptq", "awq-gptq"])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_layers_before_the_first_that_differs_are_taken_over(
    method: str, layer: int, series: Callable[[str], Series]
) -> None:
    """Where inputs are looked at, layers are reused up to the first one that differs, and the files are the same."""
    own = series(method)
    found = base(own)
    assert own.check(found).layers_reused == 0
    made = own.check(changed(found, {f"layers.{layer}.mlp.down_proj": "int8"}))
    assert made.layers_reused == made.resumed_at == layer
    assert own.check(changed(found, {f"layers.{layer}.mlp.down_proj": "bfloat16"})).layers_reused == layer
    assert own.check(changed(found, {f"layers.{layer}.mlp.down_proj": "bfloat16"})).layers_reused == LAYERS


def test_without_inputs_every_layer_stands_alone(series: Callable[[str], Series]) -> None:
    """Rounded to nearest, all layers are reused but those that differ."""
    own = series("nearest")
    found = base(own)
    own.check(found)
    made = own.check(changed(found, {"layers.0.mlp.down_proj": "int8", "embed_tokens": "int8"}))
    assert (made.resumed_at, made.layers_reused) == (0, 2)
    made = own.check(changed(found, {"layers.1.mlp.up_proj": "int5", "embed_tokens": "int8"}))
    assert (made.resumed_at, made.layers_reused) == (0, 1)


@pytest.mark.parametrize(("method", "reused"), [("gptq", 0), ("nearest", LAYERS)])
def test_a_changed_embedding_changes_what_enters_the_layers(
    method: str, reused: int, series: Callable[[str], Series]
) -> None:
    """With another embedding nothing that looked at its inputs is reused."""
    own = series(method)
    own.check(base(own))
    assert own.check(changed(base(own), {"embed_tokens": "int8"})).layers_reused == reused


def test_a_changed_head_changes_no_layer(family: Callable[..., Path], tmp_path: Path) -> None:
    """A head of its own is rounded anew from the last layer's outputs, which are still there."""
    own = Series(family("qwen3", tie_word_embeddings=False), tmp_path, "gptq")
    own.check(base(own))
    for precision in ("int8", "int4-g32"):
        assert own.check(changed(base(own), {"lm_head": precision})).layers_reused == LAYERS


@pytest.mark.parametrize("change", [{"samples": 6}, {"damping": 0.02}, {"method": "awq"}])
def test_a_run_of_another_kind_takes_nothing_over(change: dict[str, Any], series: Callable[[str], Series]) -> None:
    """With another method or setting, the layers that are kept are of no use and are deleted."""
    own = series("gptq")
    own.check(base(own))
    own.settings = evolve(own.settings, **change)
    assert own.check(base(own)).layers_reused == 0


def test_where_streams_take_much_room_some_are_kept(
    series: Callable[[str], Series], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Activations beyond what may be kept are thinned out, and a run goes on where the inputs of a layer are."""
    own = series("gptq")
    stream_bytes = SMALL["samples"] * SMALL["sample_tokens"] * 64 * 4
    monkeypatch.setattr(run, "_STREAM_BYTES", 2 * stream_bytes)
    found = base(own)
    own.check(found)
    for layer, reused in ((1, 0), (2, 2), (2, 2)):
        precision = "int5" if own.check(found).layers_reused == LAYERS else "int8"
        assert own.check(changed(found, {f"layers.{layer}.mlp.up_proj": precision})).layers_reused == reused
        own.check(found)


def test_an_interrupted_run_of_a_series_goes_on(series: Callable[[str], Series]) -> None:
    """What was taken over before an interrupt is still there after it."""
    own = series("gptq")
    found = base(own)
    own.run(found)
    finer = changed(found, {"layers.1.mlp.up_proj": "int8"})
    with pytest.raises(Stop):
        own.run(finer, progress=stop_after(2))
    made = own.check(finer)
    assert made.layers_reused == 2
    assert not EarlierLayers(own.folder / "nowhere").folder.exists()


def test_cleared_layers_are_gone(series: Callable[[str], Series]) -> None:
    """After clearing, the folder is gone and the next run computes all."""
    own = series("gptq")
    own.run(base(own))
    assert own.earlier.folder.is_dir()
    own.earlier.clear()
    assert not own.earlier.folder.exists()
    assert own.check(base(own)).layers_reused == 0


FFN = [f"layers.{layer}.mlp.{part}_proj" for layer in range(LAYERS) for part in ("gate", "up", "down")]
MAPS = st.dictionaries(st.sampled_from(FFN), st.sampled_from(["int4-g64", "int5", "int8", "bfloat16"]), max_size=3)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=8, deadline=None)
@given(st.sampled_from(["nearest", "awq", "gptq"]), st.lists(MAPS, min_size=2, max_size=3))
def test_any_series_writes_what_single_runs_do(
    series: Callable[[str], Series], method: str, maps: list[dict[str, str]]
) -> None:
    """Whatever maps follow each other, each folder has the bytes of a run that was given nothing."""
    own = series(method)
    for precisions in maps:
        own.check(changed(base(own), precisions))
