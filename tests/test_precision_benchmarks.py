"""The benchmarks of precision maps: what they print adds up, and each variant is what its name says."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kimicore import EngineConfig, SyncEngine, assembly
from kimicore.kernels.registry import select_ops

sys.path.insert(0, str(Path(__file__).parent))  # for the rigs

from rigs.tiny import SIZES, make_tiny

ROOT = Path(__file__).parent.parent
BENCH = ROOT / "benchmarks" / "precision_speed.py"
MAPS = ["asymmetric", "uniform-int4", "uniform-int8"]
MIB = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model, whose head is not its embedding."""
    assert not SIZES["tie_word_embeddings"]
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny", num_hidden_layers=3)


def ran(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the benchmark on one thread."""
    command = [sys.executable, str(BENCH), "--threads", "1", "--dtype", "float32", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def lines(*arguments: str | Path) -> dict[str, dict[str, Any]]:
    """Return the lines that it prints by variant, after one that says on which machine."""
    done = ran(*arguments)
    assert done.returncode == 0, done.stderr
    first, *rows = map(json.loads, done.stdout.splitlines())
    assert first["case"] == "machine"
    assert first["processor"] and first["dtype"] == "float32" and set(first["products"]) >= {"packed_linear_int8"}
    found = {row["variant"]: row for row in rows}
    assert len(found) == len(rows)
    return found


def stays_packed() -> bool:
    """Whether this machine keeps quantized weights packed in float32."""
    return assembly.packed_product(select_ops("cpu", torch.float32))[0]


def test_decoding(model: Path) -> None:
    """Rates of decoding stand beside their ratio to the plain model and the bytes that each step reads."""
    rows = lines("--model", model, "--cases", "decode", "--streams", "1x6,3x4", "--repeat", "1")
    assert list(rows) == ["baseline", *MAPS]
    base = rows["baseline"]
    tensors = load_file(model / "model.safetensors")
    read = sum([one.numel() for name, one in tensors.items() if "embed_tokens" not in name])
    assert base["read_bytes"] == 4 * read
    for name, row in rows.items():
        assert set(row["tokens_per_s"]) == {"1", "3"}
        for streams, rate in row["tokens_per_s"].items():
            assert 0 < rate < math.inf
            assert row["ratio"][streams] == pytest.approx(rate / base["tokens_per_s"][streams], rel=0.01, abs=0.006)
        assert row["limit"] == round(base["read_bytes"] / row["read_bytes"], 2)
        if name != "baseline":
            assert (row["limit"] > 1) == stays_packed()


def test_a_file_as_it_is_stored(smollm2_path: Path) -> None:
    """A model that comes quantized has one more variant, whose bytes are fewer where weights stay packed."""
    rows = lines("--model", smollm2_path, "--cases", "decode", "--streams", "1x2", "--repeat", "1")
    assert list(rows) == ["baseline", *MAPS, "stored"]
    assert (rows["stored"]["limit"] > 3) == stays_packed()


def test_reading_a_prompt(model: Path) -> None:
    """The variants of prefill round the activations that they say, and nothing where they say so."""
    rows = lines("--model", model, "--cases", "prefill", "--prompt", "64", "--repeat", "2")
    assert list(rows) == ["baseline", "asymmetric", "asymmetric-16-bit", "uniform-int4", "uniform-int8"]
    for row in rows.values():
        assert row["prompt_tokens"] == 64 and row["seconds"] > 0
        assert row["ratio"] == pytest.approx(rows["baseline"]["seconds"] / row["seconds"], rel=0.01, abs=0.006)
    assert rows["baseline"]["activations"] is None and rows["asymmetric-16-bit"]["activations"] is None
    if stays_packed():
        asymmetric = rows["asymmetric"]["activations"]
        assert (asymmetric["middle"], asymmetric["ends"], asymmetric["first_tokens"]) == ("int8", "bfloat16", 16)
        for name in ("uniform-int4", "uniform-int8"):
            assert rows[name]["activations"]["middle"] == rows[name]["activations"]["ends"] == "int8"


def test_memory(model: Path) -> None:
    """A fresh process for each variant tells what it holds; the arena counts once it was written to."""
    rows = lines("--model", model, "--cases", "memory", "--arena", "64MiB")
    assert list(rows) == ["baseline", *MAPS]
    for name, row in rows.items():
        config = EngineConfig(dtype="float32", precision={"baseline": "none"}.get(name, name), kv_device_bytes="8MiB")
        with SyncEngine(model, config) as engine:
            assert row["weight_bytes"] == engine.face.loop.runner.model.weight_bytes  # type: ignore[attr-defined]
        assert 63 * MIB < row["arena_bytes"] <= 64 * MIB
        touched = row["touched_bytes"] - row["loaded_bytes"]
        assert 0.9 * row["arena_bytes"] < touched < 1.1 * row["arena_bytes"] + 8 * MIB
        assert 0 < row["loaded_bytes"] <= row["peak_bytes"] + MIB
        whole = row["weight_bytes"] + row["arena_bytes"]
        assert row["ratio"] == round(row["touched_bytes"] / whole, 3)
        assert row["loaded_ratio"] == round(row["loaded_bytes"] / row["weight_bytes"], 3)
        assert 0.9 < row["anonymous_ratio"] <= row["ratio"]
        assert row["ok"] == (row["touched_bytes"] <= 1.15 * whole)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cases", "decode,speed"], "unknown cases: speed"),
        (["--streams", "0x4"], "at least one stream"),
        (["--repeat", "0"], "must be at least 1"),
        (["--cases", "prefill", "--prompt", "1000000"], "--prompt 1000000: the text has"),
        (["--cases", "memory", "--arena", "1KiB"], "kv_device_bytes=1024"),
    ],
)
def test_what_cannot_be_is_said(arguments: list[str], said: str, model: Path) -> None:
    """A wrong option, or a model that does not load, ends the run with a word on what is wrong."""
    done = ran("--model", model, *arguments)
    assert done.returncode != 0
    assert said in done.stderr
    assert '"variant"' not in done.stdout
