"""``--skip-layers`` and ``--activations``: what is typed reaches the engine, and mistakes are told before it opens."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.rigs.tiny import make_tiny

from kimicore import EngineConfig, SyncEngine
from kimicore.cli.main import main
from kimicore.kernels.registry import select_ops
from kimicore.model.products import packed_product

ENGINE = ["--dtype", "float32", "--kv-device-bytes", "8MiB", "-q"]
PROMPT = "the cat and the other one went on and on, in the rain and in the sun, to the end of the town and back again"
ENDS = {"first_tokens": 4, "last_tokens": 6}
ROUNDED = [
    "--precision",
    "asymmetric",
    *(word for key, n in ENDS.items() for word in ("--set-precision", f"{key}={n}")),
]

packs = pytest.mark.skipif(
    not packed_product(select_ops("cpu", torch.float32))[0], reason="no native product with packed weights here"
)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny products are slower on two
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four layers whose feed-forward inputs have one channel far larger than the rest: 8 bits hurt it."""
    folder = make_tiny(tmp_path_factory.mktemp("options") / "tiny", num_hidden_layers=4)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("post_attention_layernorm.weight"):
            tensor[0] = 60.0
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            tensor[:, 0] /= 60.0
    save_file(tensors, folder / "model.safetensors")
    return folder


def answered(model: Path, **settings: Any) -> str:
    """The text of an engine with these settings."""
    with SyncEngine(model, EngineConfig(dtype="float32", kv_device_bytes="8MiB", **settings)) as engine:
        return engine.generate(PROMPT, max_tokens=32, temperature=0.0).text


def generated(model: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The text of ``kimicore generate`` with these options."""
    options = ["-m", str(model), "--max-tokens", "32", "--temperature", "0", "--json"]
    assert main(["generate", PROMPT, *options, *ENGINE, *words]) == 0
    text: str = json.loads(capsys.readouterr().out)["text"]
    return text


def test_generate_skips_layers(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``generate`` answers as the engine without these layers does, in whatever order and spacing they are named."""
    right = answered(tiny, skip_layers=(1, 2))
    assert generated(tiny, capsys, "--skip-layers", "1,2") == right
    assert generated(tiny, capsys, "--skip-layers", "2, 1") == right
    assert generated(tiny, capsys, "--skip-layers", "2") == answered(tiny, skip_layers=(2,)) != right
    assert generated(tiny, capsys) == answered(tiny) != right


def test_layers_are_skipped_beside_a_map(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A precision map rounds the layers that are left."""
    words = ["--precision", "uniform-int4", "--skip-layers", "0"]
    assert generated(tiny, capsys, *words) == answered(tiny, precision="uniform-int4", skip_layers=(0,))


@packs
def test_generate_rounds_no_input_where_told(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With ``--activations 16-bit`` the map's 8 bits in the middle of a prompt are switched off; the map's settings say
    where the middle is."""
    settings: dict[str, Any] = {"precision": "asymmetric", "policy": {"precision": ENDS}}
    mapped = generated(tiny, capsys, *ROUNDED)
    assert mapped == generated(tiny, capsys, *ROUNDED, "--activations", "map") == answered(tiny, **settings)
    plain = generated(tiny, capsys, *ROUNDED, "--activations", "16-bit")
    assert plain == answered(tiny, activations="16-bit", **settings) != mapped
    wide = ["--precision", "asymmetric", "--set-precision", "first_tokens=1000"]
    assert generated(tiny, capsys, *wide) == plain


@packs
@pytest.mark.parametrize("more", [["--skip-layers", "1"], ["--activations", "16-bit"]])
def test_chat_takes_both(
    tiny: Path, more: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """``chat`` answers otherwise without a layer, and without rounded inputs."""
    shown = []
    for words in ([], more):
        lines = tmp_path / "lines"
        lines.write_text(PROMPT)
        with lines.open() as file:
            monkeypatch.setattr(sys, "stdin", file)
            options = ["-m", str(tiny), "--max-tokens", "32", "--temperature", "0", *ROUNDED, *ENGINE, *words]
            assert main(["chat", *options]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] != shown[1]


def test_bench_measures_and_notes_them(tiny: Path, tmp_path: Path) -> None:
    """``bench`` measures the model so, and the fitted times say how it was loaded."""
    out = tmp_path / "times.json"
    words = ["--repeat", "1", "--max-batch-size", "4", "--max-batch-tokens", "32", "--fit", str(out)]
    assert main(["bench", str(tiny), *words, *ENGINE, "--skip-layers", "3,1", "--activations", "16-bit"]) == 0
    told = json.loads(out.read_text())["engine"]
    assert told["skip_layers"] == [3, 1]
    assert told["activations"] == "16-bit"


def test_doctor_loads_the_layers_that_are_left(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``doctor`` shows the files as they are, and in memory what is left; layers need a model that has them."""
    sizes = []
    for words, told in (([], "precision='stored'\n"), (["--skip-layers", "3,0"], "='stored' without layers 0, 3\n")):
        assert main(["doctor", str(tiny), "--dtype", "float32", *words]) == 0
        shown = capsys.readouterr().out
        assert "llama: 4 layers" in shown
        (line,) = [one for one in shown.splitlines() if one.startswith("in memory  ")]
        assert f"{line}\n".endswith(told)
        sizes.append(int(line.split()[2].replace(",", "")))
    width, inner = 64, 96
    layer = 4 * (2 * width * width + 2 * width * width // 2 + 3 * width * inner + 2 * width)
    assert sizes[0] - sizes[1] == 2 * layer
    assert main(["doctor", "--skip-layers", "1"]) == 2
    assert "--skip-layers 1: goes with a model" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["generate", "x", "-m"], ["chat", "-m"], ["bench"], ["warmup"], ["doctor"]])
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--skip-layers", "one"], "--skip-layers 'one': write layers by number, counted from 0, such as 11,12"),
        (["--skip-layers", ""], "--skip-layers '': write layers by number"),
        (["--skip-layers", "1,,2"], "--skip-layers '1,,2': write layers by number"),
        (["--skip-layers", "1-3"], "--skip-layers '1-3': write layers by number"),
        (["--skip-layers=-1"], "--skip-layers '-1': write layers by number"),
        (["--skip-layers", "²"], "write layers by number"),
        (["--skip-layers", "9" * 5000], "write layers by number"),
        (["--skip-layers", "1,1"], "skip_layers=(1, 1): name each layer once"),
        (["--skip-layers", "4096"], "skip_layers[0]=4096: must be from 0 to 4095"),
    ],
)
def test_what_is_no_list_of_layers_is_told_first(
    command: list[str], words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What no model could be loaded without is refused before the model is looked for, in one line."""
    assert main([*command, "/nowhere/model", *words]) == 2
    shown = capsys.readouterr().err
    assert told in shown
    assert shown.count("\n") == 1
    assert len(shown) < 400


@pytest.mark.parametrize("command", [["generate", "x", "-m"], ["chat", "-m"], ["bench"]])
def test_other_activations_are_told_first(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Another word for activations is refused with those that there are, before the model is looked for."""
    assert main([*command, "/nowhere/model", "--activations", "int8"]) == 2
    assert "activations='int8': must be one of map, 16-bit" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["generate", "x", "-q", "-m"], ["bench", "-q"], ["warmup", "-q"], ["doctor"]])
def test_layers_that_are_not_there_are_told_before_weights_are_read(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model's files say how many layers it has: a model that lacks a tensor is not even read so far."""
    folder = make_tiny(tmp_path / "broken")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert main([*command, str(folder), "--skip-layers", "1,2"]) == 2
    assert "skip_layers[1]=2: the model has 2 layers, numbered from 0 to 1" in capsys.readouterr().err
