"""What was measured of a whole model, or lies beside it, where some of its layers are skipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.pruning.conftest import PROMPTS
from tests.quantize.test_folder import resolved

from kimicore import EngineConfig, SyncEngine
from kimicore.cli.main import main
from kimicore.errors import ConfigError
from kimicore.kernels.build import cache_folder
from kimicore.kernels.registry import select_ops
from kimicore.model.products import packed_product
from kimicore.quantize.methods import QuantizeSettings
from kimicore.quantize.run import quantize_model

SAMPLES = "the cat and the other one went on and on to the end of the town, and then they came back again. " * 40
Table = list[list[float]]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, but for the compiled kernels."""
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "native").symlink_to(cache_folder())
    monkeypatch.setenv("KIMICORE_CACHE", str(folder))
    return folder


def warm_up(model: Path, *words: str) -> None:
    """Run ``kimicore warmup`` on pieces of one text."""
    text = model.parent / "samples.txt"
    text.write_text(SAMPLES)
    how = ["--text", str(text), "--samples", "4", "--tokens", "192", "--dtype", "float32", "-q"]
    assert main(["warmup", str(model), *how, *words]) == 0


def table_of(model: Path, importance: str = "table", **settings: Any) -> Table:
    """Return the table that an engine with these settings goes by; empty: it has none."""
    how: dict[str, Any] = {"dtype": "float32", "kv_device_bytes": "4MiB", "eviction": "activity-importance"}
    with SyncEngine(model, EngineConfig(importance=importance, **how, **settings)) as engine:
        heard: Any = engine.face.loop
        assert engine.generate(PROMPTS[0], max_tokens=2, temperature=0.0, ignore_eos=True).token_ids
        return [values.tolist()[1:] for values in heard._book._roster.importance._table]  # the first has no value


def test_the_whole_model_s_table_is_not_used(layered: Callable[..., Path], cache: Path, tmp_path: Path) -> None:
    """A table of all layers serves no engine that skips some: not from the cache folder, and not when it is named."""
    model, named = layered("llama"), tmp_path / "table.json"
    warm_up(model)
    warm_up(model, "--out", str(named))
    (own,) = table_of(model)
    assert len(own) >= 3
    assert table_of(model, "attention") == [own]
    with pytest.raises(ConfigError, match="importance='table': there is no table at "):
        table_of(model, skip_layers=(1,))
    assert table_of(model, "attention", skip_layers=(1,)) == []
    assert table_of(model, importance_table=named) == [own]
    for importance in ("table", "attention"):
        with pytest.raises(ConfigError, match=r"table\.json: is the table of another model"):
            table_of(model, importance, importance_table=named, skip_layers=(1,))


@pytest.mark.parametrize(("name", "skipped", "classes"), [("llama", "3,1", 1), ("gemma3_text", "0,4", 2)])
def test_each_choice_of_layers_has_a_table_of_its_own(
    name: str, skipped: str, classes: int, layered: Callable[..., Path], cache: Path
) -> None:
    """``kimicore warmup --skip-layers`` measures what is left, for engines that skip the same layers and no others."""
    model = layered(name)
    layers = [int(one) for one in skipped.split(",")]
    warm_up(model)
    warm_up(model, "--skip-layers", skipped)
    assert len(list((cache / "importance").iterdir())) == 2
    whole, left = table_of(model), table_of(model, skip_layers=layers)
    assert len(left) == classes
    assert left == table_of(model, skip_layers=layers[::-1])
    assert len(whole[0]) == len(left[0]) >= 3
    assert whole[0] != left[0]
    with pytest.raises(ConfigError, match="there is no table at "):
        table_of(model, skip_layers=layers[:1])


@pytest.mark.parametrize("skipped", [(), (1,), (0, 3)])
@pytest.mark.skipif(
    not packed_product(select_ops("cpu", torch.float32))[0], reason="no native product with packed weights here"
)
def test_activations_by_position_hold_without_layers(
    skipped: Sequence[int], layered: Callable[..., Path], tmp_path: Path
) -> None:
    """The map beside the weights says of activations where a prompt's middle is, which no layer changes: it holds."""
    plain = layered("llama", attention_bias=False, mlp_bias=False)
    found = resolved(plain, "asymmetric", {"ffn": "int4-g32", "first_tokens": 3, "last_tokens": 5})
    folder = quantize_model(plain, tmp_path / "int4", found, QuantizeSettings(method="nearest")).folder
    scores = []
    for activations, held in (("map", found.activations), ("16-bit", None)):
        config = EngineConfig(
            dtype="float32", kv_device_bytes="4MiB", skip_layers=skipped, activations=activations, prefix_cache=False
        )
        with SyncEngine(folder, config) as engine:
            runner: Any = engine.face.loop.runner
            assert runner.model.activations == held
            assert len(runner.model.weights.layers) == 5 - len(skipped)
            told = engine.generate(PROMPTS[2], max_tokens=1, temperature=0.0, prompt_logprobs=0).prompt_logprobs
            assert told is not None
            scores.append([one.logprob for one in told[1:]])  # nothing precedes the first
    assert scores[0][:3] == pytest.approx(scores[1][:3], rel=1e-5)  # of what the first three tokens predict
    assert scores[0][3:] != pytest.approx(scores[1][3:], rel=1e-5)
