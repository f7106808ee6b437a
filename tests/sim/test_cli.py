"""``kimicore simulate`` and ``kimicore bench`` from the shell's side."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from kimicore.cli.main import main
from kimicore.sim.cost import StepTimes
from kimicore.sim.loads import multi_turn
from kimicore.sim.measure import Batch, fit_engine
from kimicore.sim.traces import read_trace, write_trace

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the rigs

from rigs.tiny import make_tiny

POISSON = ["--generate", "poisson", "--rate", "4", "--duration", "20"]


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    """A trace of conversations."""
    path = tmp_path / "talks.jsonl"
    write_trace(path, multi_turn(0.5, 120.0, seed=1))
    return path


def figures(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return the JSON of a run."""
    assert main(["simulate", *arguments, "--json", "-", "-q"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_trace_is_simulated_to_table_json_and_page(
    talks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One run prints the table and writes both files, and a second one gives the same JSON."""
    out, html = tmp_path / "out.json", tmp_path / "out.html"
    assert main(["simulate", str(talks), "--json", str(out), "--html", str(html), "--tiers", "20/60/20"]) == 0
    assert "met their targets" in capsys.readouterr().out
    first = json.loads(out.read_text())
    assert first["requests"] == len(read_trace(talks))
    assert "talks.jsonl" in html.read_text()
    assert figures([str(talks), "--tiers", "20/60/20"], capsys) == first
    assert figures([str(talks), "--tiers", "20/60/20", "--no-leap"], capsys)["ttft_s"] == first["ttft_s"]


def test_settings_reach_the_simulation(talks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every option of the engine is in the report's settings."""
    times = tmp_path / "times.json"
    StepTimes(base_s=0.5).write(times)
    arguments = (
        f"{talks} --batching priority --set batching.aging_s=2 --padding max-len --eviction lru --kv-blocks 300 "
        "--block-tokens 32 --max-batch-size 8 --max-batch-tokens 64 --min-batch-size 2 --max-wait-s 0.2 "
        f"--target-step-s 0.1 --max-waiting 50 --not-streamed --seed 3 --times {times} "
        "--targets interactive=0.2,tpot=0.03"
    )
    config = figures(arguments.split(), capsys)["config"]
    assert config["policy"] == {"batching": {"aging_s": 2}}
    assert (config["batching"], config["padding"], config["streamed"]) == ("priority", "max-len", False)
    assert (config["kv_blocks"], config["block_tokens"], config["max_batch_size"]) == (300, 32, 8)
    assert (config["max_batch_tokens"], config["min_batch_size"], config["max_wait_s"]) == (64, 2, 0.2)
    assert (config["target_step_s"], config["max_waiting"], config["seed"]) == (0.1, 50, 3)
    assert config["times"]["base_s"] == 0.5
    assert config["ttft_s"]["interactive"] == 0.2
    assert config["tpot_s"] == 0.03


def test_a_load_is_drawn_scaled_and_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A drawn load can be kept as a trace, at another density."""
    saved = tmp_path / "load.jsonl"
    found = figures([*POISSON, "--load", "2", "--save", str(saved), "--lengths", "code", "--tenants", "3"], capsys)
    load = read_trace(saved)
    assert found["requests"] == len(load)
    assert found["fairness"]["tenants"] == 3
    assert load[-1].arrived_s < 10.0
    assert figures([str(saved), "--limit", "5"], capsys)["requests"] == 5


def test_a_bare_cache_is_replayed(talks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rate of blocks found stands at the top; a cache of everything finds more than a small one."""
    large = figures([str(talks), "--cache-only", "--kv-blocks", "100000", "--block-tokens", "64"], capsys)
    small = figures([str(talks), "--cache-only", "--kv-blocks", "20", "--block-tokens", "64"], capsys)
    assert 0.0 <= small["block_hit_rate"] < large["block_hit_rate"] < 1.0
    ids = [one.blocks for one in read_trace(talks)]
    seen: set[int] = set()
    found = 0
    for blocks in ids:
        found += len(seen & set(blocks))
        seen.update(blocks)
    assert large["block_hit_rate"] == pytest.approx(found / sum(map(len, ids)))
    warm = figures([str(talks), "--cache-only", "--kv-blocks", "100000", "--report-from", "0.5"], capsys)
    assert warm["requests"] == len(ids) - len(ids) // 2


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ([], "--generate"),
        (["nowhere.jsonl"], "nowhere.jsonl"),
        (["nowhere.jsonl", *POISSON], "--generate"),
        (["nowhere.jsonl", "--rate", "3"], "--rate"),
        (["--generate", "poisson"], "--rate"),
        ([*POISSON, "--limit", "0"], "--limit"),
        ([*POISSON, "--report-from", "1"], "--report-from"),
        ([*POISSON, "--load", "0"], "load"),
        ([*POISSON, "--tiers", "1/2"], "--tiers"),
        ([*POISSON, "--targets", "interactive"], "--targets"),
        ([*POISSON, "--targets", "urgent=1"], "urgent"),
        ([*POISSON, "--set", "half_life_s=3"], "--set"),
        ([*POISSON, "--set", "batching."], "such as eviction.half_life_s=300"),
        ([*POISSON, "--set", "batching.speed=3"], "speed"),
        ([*POISSON, "--batching", "no-such"], "no-such"),
        ([*POISSON, "--times", "nowhere.json"], "nowhere.json"),
        ([*POISSON, "--json", "nowhere/out.json"], "nowhere"),
        ([*POISSON, "--html", "nowhere/out.html"], "nowhere"),
        ([*POISSON, "--html", "-"], "--html -"),
        ([*POISSON, "--save", "-"], "--save -"),
        ([*POISSON, "--cache-only"], "block ids"),
        ([*POISSON, "--cache-only", "--html", "x.html"], "--html"),
        ([*POISSON, "--kv-blocks", "0"], "kv_blocks"),
        ([*POISSON, "--block-tokens", "0"], "block_tokens"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is refused with the option or the value named, status 1 or 2, and no trace of Python."""
    assert main(["simulate", *arguments]) in (1, 2)
    error = capsys.readouterr().err
    assert what in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "given",
    [
        "--batching fcfs", "--padding packed", "--load 1", "--tiers 20/60/20", "--targets tpot=1", "--times x.json",
        "--max-batch-size 0", "--max-batch-tokens 9", "--min-batch-size 1", "--max-wait-s 0", "--target-step-s 1",
        "--max-waiting 4096", "--no-leap", "--not-streamed", "--html x.html",
    ],
)  # fmt: skip
def test_a_bare_cache_refuses_what_has_no_meaning_there(
    given: str, talks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An option of the engine, also one given as it would be anyway, is named and not passed over."""
    assert main(["simulate", str(talks), "--cache-only", *given.split()]) == 2
    error = capsys.readouterr().err
    assert "--cache-only" in error
    assert f"leave {given.split()[0]} out" in error


def test_a_bare_cache_says_its_share_in_percent(talks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a reader expects of a share of a count."""
    assert main(["simulate", str(talks), "--cache-only", "--kv-blocks", "100000"]) == 0
    assert re.match(r"\d+\.\d\d % of \d+ blocks found \(lru\)\n", capsys.readouterr().out)


@pytest.mark.parametrize("option", ["--json", "--html", "--save"])
@pytest.mark.parametrize("how", ["folder", "file", "new"])
def test_files_that_cannot_be_written_are_noticed_before_the_work(
    option: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder, and a file or place that may not be written, are refused and named while nothing has been read."""
    path = tmp_path / "out"
    if how == "folder":
        path.mkdir()
    elif how == "file":
        path.touch()
    if how != "folder":
        monkeypatch.setattr("kimicore.cli.options.os.access", lambda *given: False)
    monkeypatch.setattr("kimicore.cli.simulate.load_of", lambda options: pytest.fail("the load was drawn"))
    assert main(["simulate", *POISSON, option, str(path)]) == 2
    error = capsys.readouterr().err
    assert str(path) in error
    assert ("is a folder" if how == "folder" else "cannot be written") in error


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model."""
    return make_tiny(tmp_path_factory.mktemp("tiny"))


def test_bench_fits_step_times(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The steps of a real engine are measured and written as times that simulate takes."""
    out = tmp_path / "times.json"
    arguments = ["bench", str(tiny), "--fit", str(out), "--repeat", "1", "--max-batch-size", "4", "-q"]
    assert main([*arguments, "--dtype", "float32", "--kv-device-bytes", "8MiB"]) == 0
    assert "off by" in capsys.readouterr().out
    times = StepTimes.read(out)
    assert json.loads(out.read_text())["fit"]["steps"] > 40
    found = figures([*POISSON, "--times", str(out)], capsys)
    assert found["config"]["times"]["base_s"] == times.base_s


def test_measuring_leaves_the_engine_as_it_was(tiny: Path) -> None:
    """The engine serves as before once it has been measured."""
    from kimicore import EngineConfig, SyncEngine

    config = EngineConfig(dtype="float32", kv_device_bytes="8MiB", prefix_cache=False)
    with SyncEngine(tiny, config) as engine:
        before = engine.generate([5, 6, 7], max_tokens=6, temperature=0.0).token_ids
        found = fit_engine(engine, repeat=1, batches=[Batch((8, 40), 12), Batch((30,), 4)])
        assert found.measurements >= 8
        assert engine.generate([5, 6, 7], max_tokens=6, temperature=0.0).token_ids == before


@pytest.mark.parametrize(
    ("arguments", "what"), [(["--repeat", "0"], "--repeat"), (["--fit", "nowhere/out.json"], "nowhere")]
)
def test_bench_refuses_bad_input_before_it_loads(
    arguments: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model is not looked for."""
    assert main(["bench", "no-such-model", *arguments]) == 2
    assert what in capsys.readouterr().err
