"""The ladder: costs are measured, bytes go where they gain most, and the end is a verdict."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.quantize.test_folder import resolved
from tests.quantize.test_layers import ids, whole_logits
from tests.rigs.tiny import make_tiny

from kimicore.cli.main import main
from kimicore.contracts import ModuleView
from kimicore.kernels.packed_linear.reference import unpack
from kimicore.model.load import open_source
from kimicore.model.packed.rounding import round_to_nearest
from kimicore.policies.precision import PRECISIONS, ResolvedMap, ResolvedModule
from kimicore.quantize.finish import read_record
from kimicore.quantize.path import ClimbPath, PathStep
from kimicore.quantize.reading import ModelReader
from kimicore.quantize.sensitivity import RUNGS, Cost, measure_costs, rungs_of, total
from kimicore.verify.report import Report


def a_map(shapes: list[tuple[int, int]], precision: str = "int4") -> ResolvedMap:
    modules = [ModuleView(f"layers.{at}.mlp.up_proj", "ffn", shape) for at, shape in enumerate(shapes)]
    norm = ResolvedModule(ModuleView("norm", "norm", (8,)), "bfloat16", "default")
    return ResolvedMap((*(ResolvedModule(one, precision, "exact") for one in modules), norm))


@st.composite
def costs(draw: st.DrawFn) -> tuple[ResolvedMap, list[Cost]]:
    """A map of a few matrices, and losses that fall with each rung."""
    found = a_map([(draw(st.integers(1, 40)), 128 * draw(st.integers(1, 4))) for _ in range(draw(st.integers(1, 6)))])
    made = []
    for one in found.modules[:-1]:
        loss = draw(st.floats(1e-6, 1.0))
        losses = {}
        for rung in rungs_of(one):
            losses[rung] = 0.0 if rung == "bfloat16" else loss
            loss *= draw(st.floats(0.05, 0.95))
        made.append(Cost(one, losses))
    return found, made


def chosen_of(found: ResolvedMap) -> dict[str, str]:
    return {one.module.name: one.precision for one in found.modules}


@given(costs(), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_a_climb_reaches_what_it_aims_at(given_costs: tuple[ResolvedMap, list[Cost]], a: float, b: float) -> None:
    """The losses of a climbed map are under the aim, a lower aim never takes fewer bytes, and nothing gets coarser."""
    found, made = given_costs
    path = ClimbPath.of(found, made)
    low, high = sorted((a * path.losses[0], b * path.losses[0]))
    maps = {most: path.map_at(path.position(most)) for most in (low, high)}
    for most, climbed in maps.items():
        assert total(made, chosen_of(climbed)) <= most + 1e-12
        for before, after in zip(found.modules, climbed.modules, strict=True):
            assert PRECISIONS[after.precision].weight_bytes(after.module.shape) >= before.weight_bytes
            assert (after.rule == "ladder") == (after.precision != before.precision)
    assert maps[low].weight_bytes >= maps[high].weight_bytes
    assert path.map_at(path.position(path.losses[0])) == found


@given(costs())
def test_a_path_leads_from_the_map_to_16_bits(given_costs: tuple[ResolvedMap, list[Cost]]) -> None:
    """Each step adds bytes and takes away loss that is told right, and behind the last one nothing is rounded."""
    found, made = given_costs
    path = ClimbPath.of(found, made)
    maps = [path.map_at(at) for at in range(path.last + 1)]
    assert maps[0] == found
    assert {one.precision for one in maps[-1].modules} == {"bfloat16"}
    for at, climbed in enumerate(maps):
        assert path.losses[at] == pytest.approx(total(made, chosen_of(climbed)), abs=1e-12)
    for before, after in pairwise(maps):
        assert after.weight_bytes > before.weight_bytes
    assert list(path.losses) == sorted(path.losses, reverse=True)
    worths = [step.worth for step in path.steps]
    assert worths == pytest.approx(sorted(worths, reverse=True))


@given(costs(), st.data())
def test_the_middle_lies_between(given_costs: tuple[ResolvedMap, list[Cost]], data: st.DataObject) -> None:
    """The middle of two positions lies strictly between them, wherever a position does, and nowhere else."""
    path = ClimbPath.of(*given_costs)
    low = data.draw(st.integers(0, path.last))
    high = data.draw(st.integers(low, path.last))
    middle = path.between(low, high)
    assert (middle is None) == (high - low < 2)
    assert middle is None or low < middle < high


def test_the_middle_is_that_of_magnitudes() -> None:
    """Between losses of 1 and 0.0001 nats the middle is at 0.01, and not at the half, where nearly all misses lie."""
    found = a_map([(8, 128)] * 4)
    losses = [1.0, 0.5, 0.1, 0.009, 0.0001]
    path = ClimbPath(found, tuple(PathStep(f"layers.{at}.mlp.up_proj", "int8", 1.0) for at in range(4)), tuple(losses))
    assert path.between(0, 4) == 3
    assert path.between(0, 3) == 2
    to_nothing = evolve(path, losses=(1.0, 0.6, 0.2, 0.05, 0.0))
    assert to_nothing.between(0, 4) == 2


def test_the_matrix_that_matters_climbs_first() -> None:
    """Of two matrices of one size, the one whose loss is larger gets the finer precision."""
    found = a_map([(8, 128), (8, 128)])
    losses = {"int4": 1.0, "int4-g64": 0.8, "int4-g32": 0.6, "int5": 0.2, "int8": 0.01, "bfloat16": 0.0}
    made = [
        Cost(found.modules[0], {rung: 0.01 * loss for rung, loss in losses.items()}),
        Cost(found.modules[1], losses),
    ]
    path = ClimbPath.of(found, made)
    climbed = path.map_at(path.position(0.3))
    assert climbed.modules[0].precision == "int4"
    assert RUNGS.index(climbed.modules[1].precision) >= RUNGS.index("int5")


def test_a_precision_that_gains_nothing_is_passed_over() -> None:
    """Where one scale a row errs more than five bits in groups, the matrix goes on to 16 bits, and not last of all."""
    found = a_map([(8, 128), (8, 128)], "int5")
    made = [
        Cost(found.modules[0], {"int5": 1.0, "int8": 3.0, "bfloat16": 0.0}),
        Cost(found.modules[1], {"int5": 0.1, "int8": 0.01, "bfloat16": 0.0}),
    ]
    path = ClimbPath.of(found, made)
    assert [(step.module, step.precision) for step in path.steps] == [
        ("layers.0.mlp.up_proj", "bfloat16"),
        ("layers.1.mlp.up_proj", "int8"),
        ("layers.1.mlp.up_proj", "bfloat16"),
    ]


def test_rungs_are_those_that_fit() -> None:
    """A matrix climbs only through precisions whose groups divide its inputs, each larger than the one before."""
    module = ModuleView("layers.0.mlp.up_proj", "ffn", (64, 576))
    assert rungs_of(ResolvedModule(module, "int4-g64", "exact")) == (
        "int4-g64", "int4-g32", "int5", "int8", "bfloat16",
    )  # fmt: skip
    odd = ModuleView("layers.0.mlp.up_proj", "ffn", (64, 100))
    assert rungs_of(ResolvedModule(odd, "int8", "exact")) == ("int8", "bfloat16")


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_a_cost_is_the_loss_of_that_matrix_alone(name: str, family: Callable[..., Path]) -> None:
    """Each cost is the KL of the whole model with only that matrix rounded, and falls with finer precisions."""
    folder = family(name, tie_word_embeddings=True, num_hidden_layers=2)
    reader = ModelReader.of(open_source(folder))
    found = resolved(folder, "uniform-int4")
    token_ids = ids(2)
    made = measure_costs(reader, found, token_ids)
    assert made[0].module.module.name == "embed_tokens"
    assert len(made) == 1 + 2 * 7
    layers = [reader.layer(index) for index in range(2)]
    with torch.inference_mode():
        wanted = whole_logits(reader, layers, token_ids)[:, 3::4].log_softmax(-1)
        for one in made[1:]:
            _, number, key = one.module.module.name.split(".", 2)
            changed = [dict(own) for own in layers]
            weight = changed[int(number)][f"{key}.weight"]
            changed[int(number)][f"{key}.weight"] = unpack(
                round_to_nearest(weight, one.module.precision), torch.float32
            )
            logs = whole_logits(reader, changed, token_ids)[:, 3::4].log_softmax(-1)
            loss = float((wanted.exp() * (wanted - logs)).sum(-1).mean())
            assert one.losses[one.module.precision] == pytest.approx(loss, rel=0.02, abs=1e-6)
            values = list(one.losses.values())
            assert values == sorted(values, reverse=True)
            assert one.losses["bfloat16"] == 0.0


WORDS = ["--samples", "5", "--sample-tokens", "64", "--threads", "1", "-q", "--ladder", "--prompts", "5"]


def test_the_ladder_ends_in_a_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model whose rounding to 4 bits fails is climbed until it passes, and keeps its map and the report."""
    source, out = make_tiny(tmp_path / "source"), tmp_path / "out"
    assert main(["quantize", str(source), "--out", str(out), *WORDS]) == 0
    text = capsys.readouterr().out
    assert "not yet" in text.splitlines()[0]
    assert "pass: agreement" in text
    _, found = read_record(out)
    climbed = {one.module.kind for one in found.modules if one.rule == "ladder"}
    assert climbed == {"ffn"}
    report = Report.read(out / "verify.json")
    assert report.passed
    assert report.candidate.model == str(out)
    assert report.candidate.fingerprint == open_source(out).fingerprint
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out", "source"]


def test_a_model_that_cannot_be_quantized_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where every group holds a weight that dwarfs the rest, only 16 bits do: exit status 1, and nothing is written."""
    source = make_tiny(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    for name, weight in tensors.items():
        if name.endswith("post_attention_layernorm.weight"):
            weight[::16] = 0.0  # so that what the large weights below are multiplied with is nothing
        if name.endswith("mlp.up_proj.weight"):
            weight[::16] = 0.0
        if ".mlp." in name:
            weight[:, ::16] = 3000.0
    for name in [one for one in tensors if one.endswith("mlp.up_proj.weight")]:
        tensors[name][::16] = 0.0
    save_file(tensors, source / "model.safetensors")
    words = ["quantize", str(source), *WORDS, "--method", "nearest"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 1
    text = capsys.readouterr().out
    assert "not quantizable: it takes at least 50% under 16 bits" in text
    assert [one.name for one in tmp_path.iterdir()] == ["source"]
    assert main([*words, "--out", str(tmp_path / "out"), "--keep-failed"]) == 1
    assert json.loads((tmp_path / "out" / "verify.json").read_text())["candidate"]["model"] == str(tmp_path / "out")
