"""Which layers go: those that do least, one after another, measured anew each time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.pruning.conftest import LAYERS

from kimicore.errors import ConfigError, ModelLoadError
from kimicore.model.load import open_source
from kimicore.pruning.choosing import CANDIDATES, Choice, Removal, choose
from kimicore.pruning.influence import Loss, block_influence
from kimicore.pruning.run import PruneSettings, choose_layers, write_without
from kimicore.quantize.calibration import KINDS
from kimicore.quantize.reading import ModelReader
from kimicore.verify import ModelChoice, Scorer

SMALL = PruneSettings(samples=5, sample_tokens=40, prompts=5)


def ids() -> torch.Tensor:
    return torch.randint(3, 300, (3, 50), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text"])
def test_influence_is_that_of_transformers_hidden_states(
    name: str, layered: Callable[..., Path], oracle: Callable[[Path, Sequence[int]], Any]
) -> None:
    """1 less the mean cosine of what enters and leaves each layer, by hooks on transformers' own, cut or whole."""
    folder = layered(name)
    for skipped in ((), (1, 2)):
        model = oracle(folder, skipped)
        wanted: list[float] = []

        def note(module: Any, given: Any, made: Any, wanted: list[float] = wanted) -> None:
            after = made[0] if isinstance(made, tuple) else made
            a, b = given[0].double(), after.double()
            cosines = (a * b).sum(-1) / (a.square().sum(-1) * b.square().sum(-1)).sqrt()
            wanted.append(1.0 - float(cosines.mean()))

        for layer in model.model.layers:
            layer.register_forward_hook(note)
        with torch.inference_mode():
            model(ids(), use_cache=False)
        kept = [one for one in range(LAYERS) if one not in skipped]
        found = block_influence(ModelReader.of(open_source(folder)), ids(), kept)
        assert found == pytest.approx(wanted, abs=1e-4)
        assert min(found) > 0.01  # so that the tolerance hides nothing


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_layer_that_does_nothing_goes_first(layer: int, identity: Callable[..., Path]) -> None:
    """The influence of a planted identity is 0, that of all others is far above, and it is the one that goes."""
    choice = choose_layers(identity(layer), 1, SMALL)
    assert choice.influence[layer] < 1e-9
    assert min(one for at, one in enumerate(choice.influence) if at != layer) > 0.01
    assert choice.skip_layers == (layer,)


def test_identities_go_before_all_others_by_their_loss_too(identity: Callable[..., Path]) -> None:
    """Measured by KL, two planted identities go first, at no loss, and the third layer costs something."""
    choice = choose_layers(identity(1, 3), 3, PruneSettings("kl", samples=5, sample_tokens=40, prompts=5))
    assert {one.layer for one in choice.removals[:2]} == {1, 3}
    assert [one.kl for one in choice.removals[:2]] == pytest.approx([0.0, 0.0], abs=1e-9)
    assert (choice.removals[2].kl or 0.0) > 0.01


def test_the_loss_is_that_of_the_written_folder(layered: Callable[..., Path], tmp_path: Path) -> None:
    """What a cut costs in memory is the KL that the same comparison finds for the folder that is written."""
    folder = layered("gemma3_text")
    choice = Choice((0.5,) * LAYERS, (Removal(3, 0.5), Removal(1, 0.5)))
    made = write_without(open_source(folder), tmp_path / "out", choice).folder
    with Loss(folder, prompts=5) as loss:
        found = loss([0, 2, 4])
    texts = [str(Path(__file__).parents[2] / f"src/kimicore/quantize/texts/{kind}.txt") for kind in KINDS]
    with Scorer(folder, prompts=5, new_tokens=32, texts=texts, text_tokens=0) as scorer:
        measured, _ = scorer.score_model(ModelChoice(made), edit=False, texts=False)
    assert found == pytest.approx(measured.all.kl.value, rel=1e-5)
    assert found > 0.01


Table = dict[tuple[int, ...], tuple[float, ...]]


@given(st.integers(2, 6), st.data())
def test_each_removal_is_the_least_of_what_is_left(layers: int, data: st.DataObject) -> None:
    """Whatever influences and losses are, each step takes the least one as it is measured then, ties the first."""
    numbers = st.sampled_from([0.0, 0.1, 0.2, 0.5, 1.0])
    seed = data.draw(st.integers(0, 1 << 30))
    influences: Table = {}
    losses: dict[tuple[int, ...], float] = {}

    def influence(kept: Sequence[int]) -> Sequence[float]:
        noise = torch.Generator().manual_seed(seed + sum(1 << one for one in kept))
        return influences.setdefault(tuple(kept), tuple(torch.randint(0, 4, (len(kept),), generator=noise).tolist()))

    def loss(kept: Sequence[int]) -> float:
        assert tuple(kept) not in losses  # none is measured twice
        losses[tuple(kept)] = data.draw(numbers)
        return losses[tuple(kept)]

    count = data.draw(st.integers(1, layers - 1))
    with_loss = data.draw(st.booleans())
    choice = choose(layers, count, influence, loss if with_loss else None)
    kept = list(range(layers))
    assert choice.influence == influences[tuple(kept)]
    for removal in choice.removals:
        now = dict(zip(kept, influences[tuple(kept)], strict=True))
        assert removal.influence == now[removal.layer]
        ranked = sorted(now, key=lambda one: (now[one], one))
        if with_loss:
            tried = {one: losses[tuple(x for x in kept if x != one)] for one in ranked[:CANDIDATES]}
            assert removal.kl == tried[removal.layer] == min(tried.values())
        else:
            assert removal == Removal(ranked[0], now[ranked[0]], None)
        kept.remove(removal.layer)
    assert len(influences) == count
    assert choice.skip_layers == tuple(one for one in range(layers) if one not in kept)


def test_influence_is_measured_again_without_what_went(layered: Callable[..., Path]) -> None:
    """What a later removal is told with is the influence in the cut model, not that in the whole one."""
    folder = layered("llama")
    tensors = load_file(folder / "model.safetensors")
    for part in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"model.layers.1.{part}.weight"] *= 0.1  # so that an early layer goes first
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    choice = choose_layers(folder, 4, SMALL)
    first, second = choice.removals[:2]
    assert first.influence == choice.influence[first.layer] == min(choice.influence)
    gone: list[int] = []
    for one in choice.removals:  # a layer notices those before it
        assert (one.influence != choice.influence[one.layer]) == any(other < one.layer for other in gone)
        gone.append(one.layer)
    assert any(one.influence != choice.influence[one.layer] for one in choice.removals)
    told = choice.table().splitlines()
    assert len(told) == LAYERS + 1
    assert f"goes as number 2, at {second.influence:.5f}" in told[1 + second.layer]
    assert choice == choose_layers(folder, 4, SMALL)


def test_a_stream_that_is_not_finite_is_an_error(layered: Callable[..., Path]) -> None:
    """Damaged weights are named with their layer, and never taken for an influence."""
    folder = layered("llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.mlp.down_proj.weight"][0, 0] = torch.inf
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match="out of layer 2 is not finite"):
        choose_layers(folder, 1, SMALL)


@pytest.mark.parametrize(
    ("count", "told"), [(0, "layers=0: must be at least 1"), (-2, "layers=-2"), (5, "the model has 5"), (99, "has 5")]
)
def test_counts_that_cannot_be_are_refused(count: int, told: str, layered: Callable[..., Path]) -> None:
    """None, fewer, all or more layers than the model has are a ConfigError."""
    with pytest.raises(ConfigError, match=told):
        choose_layers(layered("llama"), count, SMALL)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"measure": "guess"}, "measure='guess': must be one of influence, kl"),
        ({"samples": 0}, "samples=0"),
        ({"sample_tokens": 1}, "sample_tokens=1"),
        ({"prompts": 0}, "prompts=0"),
        ({"threads": 0}, "threads=0"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], told: str) -> None:
    """Every setting is checked where it is made."""
    with pytest.raises(ConfigError, match=told):
        PruneSettings(**settings)
