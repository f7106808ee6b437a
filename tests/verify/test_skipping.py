"""A candidate without some layers, or without rounded inputs, judged as it is loaded: nothing is written for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file, save_file
from tests.rigs.tiny import make_tiny

from kimicore.cli.main import main
from kimicore.errors import ConfigError, ModelLoadError
from kimicore.kernels.registry import select_ops
from kimicore.model.load import open_source
from kimicore.model.modules import modules_of
from kimicore.model.products import packed_product
from kimicore.model.spec import spec_from_config
from kimicore.policies.precision.named import policy_named, resolved_by
from kimicore.pruning.choosing import Choice, Removal
from kimicore.pruning.run import write_without
from kimicore.quantize.methods import QuantizeSettings
from kimicore.quantize.run import quantize_model
from kimicore.verify import ModelChoice, Report, Scorer, verify

FEW: dict[str, Any] = {"prompts": 5, "new_tokens": 8, "text_tokens": 60}
SMALL = ["--prompts", "5", "--tokens", "6", "--no-noise", "--no-edit", "--quiet"]
NAMES = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture
def four(tmp_path: Path) -> Path:
    """A model of four layers, of which layer 2 does nothing."""
    folder = make_tiny(tmp_path / "four", num_hidden_layers=4)
    tensors = load_file(folder / "model.safetensors")
    for part in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"model.layers.2.{part}.weight"].zero_()
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_it_scores_what_the_folder_without_them_does(four: Path, tmp_path: Path) -> None:
    """Skipped or written out, every figure is the same, but for the name it is of."""
    choice = Choice((0.5,) * 4, (Removal(3, 0.5), Removal(1, 0.5)))
    folder = write_without(open_source(four), tmp_path / "out", choice).folder
    skipped = verify(four, skip_layers=(3, 1), **FEW)
    written = verify(four, folder, keep=False, **FEW)
    assert skipped.scores == written.scores
    assert skipped.noise == written.noise
    assert skipped.scores.all.kl.value > 0.01
    assert skipped.candidate.weight_bytes == written.candidate.weight_bytes < skipped.baseline.weight_bytes


def test_the_verdict_is_of_what_is_left(four: Path) -> None:
    """Without a layer that does nothing it passes with full marks; without one that does something it fails."""
    for layers, passed in (((2,), True), ((2, 0), False)):
        report = verify(four, four, skip_layers=layers, keep=False, **FEW)
        assert report.passed is passed
        assert (report.scores.all.agreement.value == 1.0) is passed


def test_the_report_says_what_is_left_out(four: Path) -> None:
    """Layers that were skipped stand in the record, its JSON and its table, and the digest is not the whole model's."""
    report = verify(four, skip_layers=[3, 1], noise=False, edit=False, **FEW)
    assert report.candidate.skip_layers == (1, 3)
    assert report.baseline.skip_layers == ()
    assert report.candidate.fingerprint != report.baseline.fingerprint == open_source(four).fingerprint
    assert f"\n{four} without layers 1, 3\n{'pass' if report.passed else 'FAIL'}: " in report.table()
    assert Report.from_json(report.to_json()) == report
    assert json.loads(report.to_json())["candidate"]["skip_layers"] == [1, 3]


def test_an_older_report_is_of_a_whole_model(four: Path) -> None:
    """A report that says nothing of layers and activations is of all of them, as the map has them."""
    tree = json.loads(verify(four, dtype="bfloat16", noise=False, edit=False, **FEW).to_json())
    for side in ("baseline", "candidate"):
        del tree[side]["skip_layers"], tree[side]["activations"]
    report = Report.from_json(json.dumps(tree))
    assert (report.candidate.skip_layers, report.candidate.activations) == ((), "map")
    assert "without" not in report.table()


def test_nothing_is_kept_beside_the_whole_model(four: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No report of a part is left beside the weights, and that of the whole stays; where ``--json`` puts one there,
    ``doctor`` does not take it for the whole model's."""
    whole = verify(four, four, noise=False, edit=False, **FEW)
    kept = (four / "verify.json").read_bytes()
    assert Report.read(four / "verify.json") == whole
    assert main(["verify", str(four), str(four), "--skip-layers", "0", *SMALL]) == 1
    assert f"{four} without layers 0\nFAIL: " in capsys.readouterr().out
    assert (four / "verify.json").read_bytes() == kept
    (four / "verify.json").unlink()
    verify(four, four, skip_layers=(2,), noise=False, edit=False, **FEW)
    assert {one.name for one in four.iterdir()} == NAMES
    assert main(["verify", str(four), "--skip-layers", "2", *SMALL, "--json", str(four / "verify.json")]) == 0
    assert Report.read(four / "verify.json").candidate.skip_layers == (2,)
    capsys.readouterr()
    assert main(["doctor", str(four), "--dtype", "float32"]) == 0
    assert "verify.json is of other weights" in capsys.readouterr().out


def test_candidates_of_one_baseline(four: Path) -> None:
    """A scorer takes choices of layers one after another, with a map beside them or not."""
    with Scorer(four, **FEW) as scorer:
        found = {
            (layers, precision): scorer.score_model(ModelChoice(four, precision=precision, skip_layers=layers))[0]
            for layers in ((), (2,), (0,))
            for precision in ("stored", "uniform-int4")
        }
    assert found[(2,), "stored"].all.agreement.value == 1.0
    assert found[(), "uniform-int4"].all.kl.value > 1e-4
    assert found[(2,), "uniform-int4"].all.kl.value == pytest.approx(found[(), "uniform-int4"].all.kl.value, rel=1e-3)
    assert found[(0,), "stored"].all.kl.value > 0.01
    assert ModelChoice(four, skip_layers=(0, 1)).told == f"{four} without 2 layers in float32"


@pytest.mark.skipif(
    not packed_product(select_ops("cpu", torch.float32))[0], reason="no native product with packed weights here"
)
def test_rounded_inputs_are_switched_off(four: Path, tmp_path: Path) -> None:
    """A quantized folder is judged with its map's activations, or without; that report is not the folder's own."""
    source = open_source(four)
    policy = policy_named("asymmetric", {"ffn": "int4-g32", "first_tokens": 2, "last_tokens": 2})
    found = resolved_by(policy, modules_of(spec_from_config(source.config)))
    folder = quantize_model(source, tmp_path / "int4", found, QuantizeSettings(method="nearest")).folder
    plain = verify(four, folder, activations="16-bit", noise=False, edit=False, **FEW)
    assert not (folder / "verify.json").exists()
    mapped = verify(four, folder, noise=False, edit=False, **FEW)
    assert Report.read(folder / "verify.json") == mapped
    assert (plain.candidate.activations, mapped.candidate.activations) == ("16-bit", "map")
    assert plain.scores.all.kl != mapped.scores.all.kl
    assert f"{folder} with activations='16-bit'\n" in plain.table()
    assert evolve(plain.candidate, activations="map") == mapped.candidate
    both = verify(four, folder, activations="16-bit", skip_layers=(2,), noise=False, edit=False, **FEW)
    assert f"{folder} without layers 2, with activations='16-bit'\n" in both.table()


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"skip_layers": (4,)}, r"skip_layers\[0\]=4: the model has 4 layers, numbered from 0 to 3"),
        ({"skip_layers": (0, 1, 2, 3)}, "these are all 4 layers; leave at least one"),
        ({"skip_layers": (1, 1)}, "name each layer once"),
        ({"skip_layers": "12"}, "must be a list of layers"),
        ({"skip_layers": 3}, "must be a list of layers"),
        ({"activations": "int8"}, "activations='int8': must be one of map, 16-bit"),
    ],
)
@pytest.mark.parametrize("other", [False, True])
def test_wrong_choices_are_refused_before_any_work(four: Path, other: bool, wrong: dict[str, Any], told: str) -> None:
    """A choice that cannot be is an error that names it, with a candidate or without, and nothing is loaded for it."""
    steps: list[str] = []
    candidate = four if other else None
    with pytest.raises(ConfigError, match=told):
        verify(four, candidate, keep=False, progress=lambda what, done, total: steps.append(what), **wrong)
    assert steps == []


def test_no_layers_are_no_candidate(four: Path) -> None:
    """A model is not compared with itself because no layer of it is skipped."""
    with pytest.raises(ConfigError, match="no candidate: name a model, or a dtype, a precision or layers to skip"):
        verify(four, skip_layers=[])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--skip-layers", "2;3"], "--skip-layers '2;3': write layers by number, counted from 0, such as 11,12"),
        (["--skip-layers", "7"], "skip_layers[0]=7: the model has 4 layers"),
        (["--activations", "8-bit"], "activations='8-bit': must be one of map, 16-bit"),
    ],
)
def test_mistakes_are_told(four: Path, words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A mistake ends with 2, never with the 1 of a failed verdict, and one line on standard error."""
    assert main(["verify", str(four), *words, *SMALL]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert told in shown.err
    assert shown.err.count("\n") == 1


def test_a_missing_layer_does_not_hide(four: Path, tmp_path: Path) -> None:
    """A candidate whose file lacks a layer's tensor can be judged without that layer, and not with it."""
    lacking = make_tiny(tmp_path / "lacking", num_hidden_layers=4)
    tensors = load_file(four / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, lacking / "model.safetensors")
    assert verify(four, lacking, skip_layers=(2,), noise=False, edit=False, **FEW).passed
    with pytest.raises(ModelLoadError, match=r"model\.layers\.2\.mlp\.up_proj\.weight"):
        verify(four, lacking, noise=False, edit=False, **FEW)
