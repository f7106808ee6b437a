"""Files of sessions: how they are written, and that none is taken that is not what was written."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from kimicore import Choice, ConfigError, Engine, EngineConfig, InvalidRequest, SyncEngine
from kimicore.saved_turns import MAX_BYTES, read_saved
from kimicore.text.chat import render_chat
from rigs.sessions import full_blocks, prompt_of

pytestmark = pytest.mark.anyio
Alone = Callable[..., Choice]
LETTERS = {3 + byte: 1000.0 for byte in b"abcdefghijklmnopqrstuvwxyz"}  # other bytes would seldom make characters
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 12, "logit_bias": LETTERS}
QUESTIONS = ("in the other " * 3, "on and on", "of what? <|end|>", "é 漏")


def config(**more: Any) -> EngineConfig:
    """Return settings of a small engine."""
    return EngineConfig(**{"dtype": "float32", "kv_device_bytes": "8MiB", **more})


@pytest.fixture(scope="module")
def file(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A session's file, with everything in it."""
    path = tmp_path_factory.mktemp("saved") / "session.json"
    with SyncEngine(tiny, config()) as engine:
        session = engine.session(tenant="blue", messages=[{"role": "system", "content": "a"}])
        for question in QUESTIONS:
            session.chat(question, **GREEDY)
        saved = session.save(path)
    assert (saved.path, saved.turns, saved.stored_blocks) == (str(path), 4, 0)
    assert saved.tokens == len(session.token_ids)
    return path


async def test_another_model_answers_the_same_messages(
    file: Path, mixed: Path, alone_in: Callable[[Path], Alone]
) -> None:
    """Under other weights the saved token ids are left aside: the prompt is that of a fresh chat of all messages."""
    async with Engine(mixed, config()) as engine:
        session = engine.session(resume=file)
        result = await session.chat("next", **GREEDY)
        ids = render_chat(engine.face.tokenizer, session.messages[:-1])
        assert prompt_of(session, result) == tuple(ids)
        assert result.choices[0] == alone_in(mixed)(ids, **GREEDY)
        assert session.turns == 5
        again = await session.chat("and", **GREEDY)
        assert again.usage.cached_tokens == full_blocks(len(ids) + len(result.token_ids))


# ---------------------------------------------------------------- writing


async def test_the_file_is_its_owners_alone(shared: Engine, tmp_path: Path) -> None:
    """The file has mode 0600 whatever was there before, and no other file stays behind; a path of bytes will do."""
    path = tmp_path / "session.json"
    path.write_text("old")
    path.chmod(0o644)
    session = shared.session()
    await session.save(os.fsencode(path))  # type: ignore[arg-type]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["session.json"]
    assert shared.session(resume=path).messages == []


@pytest.mark.parametrize("broken", ["fsync", "replace"])
async def test_a_write_that_fails_keeps_the_old_file(
    shared: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """A disk that is full leaves the old file as it was and nothing beside it; the error names the file."""
    path = tmp_path / "session.json"
    session = shared.session()
    await session.save(path)
    old = path.read_bytes()
    await session.chat("in", max_tokens=2)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(f"os.{broken}", full)
        with pytest.raises(ConfigError, match=r"session\.json: cannot be written: No space"):
            await session.save(path)
    assert (path.read_bytes(), os.listdir(tmp_path)) == (old, ["session.json"])
    for wrong in (tmp_path / "none" / "a", tmp_path):
        with pytest.raises(ConfigError, match="cannot be written"):
            await session.save(wrong)
    for wrong in (7, "", "a\0b"):
        with pytest.raises(InvalidRequest, match="path"):
            await session.save(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="timeout_s"):
        await session.save(path, timeout_s=-1.0)


async def test_a_cancelled_save_leaves_the_old_file_or_the_new_one(
    shared: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled while it is written the file is whole when save() ends, and nothing comes later."""
    path = tmp_path / "session.json"
    session = shared.session()
    await session.save(path)
    await session.chat("in", max_tokens=2)
    fsync = os.fsync
    with anyio.CancelScope() as scope:

        def late(fd: int) -> None:
            anyio.from_thread.run_sync(scope.cancel)
            fsync(fd)

        monkeypatch.setattr("os.fsync", late)
        await session.save(path)
        await anyio.sleep(0)
    assert scope.cancelled_caught
    assert read_saved(path).history.turns == 1
    assert os.listdir(tmp_path) == ["session.json"]


async def test_a_save_waits_for_the_disk_no_longer_than_it_may(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV that is not on disk in time delays save() by ``timeout_s`` at most; cancelled meanwhile, it leaves the
    old file."""
    path = tmp_path / "session.json"
    async with Engine(tiny, config(kv_disk_dir=tmp_path / "kv", kv_disk_bytes="64MiB")) as engine:
        session = engine.session()
        await session.save(path)
        await session.chat("in the", **GREEDY)
        monkeypatch.setattr(engine.face.loop, "sink", lambda call: None)
        with anyio.move_on_after(0.05) as scope:
            await session.save(path)
        assert scope.cancelled_caught
        assert read_saved(path).history.turns == 0
        saved = await session.save(path, timeout_s=0.05)
        assert (saved.stored_blocks, saved.turns) == (0, 1)
        assert read_saved(path).history.turns == 1


# ---------------------------------------------------------------- files that are no good


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tenant", 7), ("tenant", "x" * 300), ("template", 7), ("variables", []), ("messages", {}), ("messages", []),
        ("messages", [{"role": "user"}] * 9), ("messages", [{"role": 1, "content": "a"}] * 9), ("model", None),
        ("tokenizer", 3), ("text", None), ("text", ""), ("token_ids", [1, -2]), ("token_ids", [True]),
        ("token_ids", "abc"), ("token_ids", [1 << 40]), ("token_ids", []), ("prompt_tokens", 1 << 20),
        ("prompt_tokens", 0), ("turns", [1.5]), ("turns", [1 << 20]), ("turns", []), ("more", 1), ("text", ...),
    ],
    ids=repr,
)  # fmt: skip
async def test_a_wrong_field_is_named(shared: Engine, file: Path, tmp_path: Path, field: str, value: Any) -> None:
    """A field that is missing, of the wrong type or does not fit to the others is refused; file and field are named."""
    tree = json.loads(file.read_text())
    tree["session"][field] = value
    if value is ...:
        del tree["session"][field]
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match=rf"bad\.json: .*({field}|prompt_tokens|text)"):
        shared.session(resume=bad)


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b"", "JSON"), (b"\xff\xfe", "JSON"), (b"[" * 100_000, "JSON"), (b"[]", "format"), (b"{}", "format"),
        (b'{"format": "kimicore-session"}', "version"), (b'{"format": "kimicore-session", "version": 3}', "version=3"),
        (b'{"format": "kimicore-session", "version": true}', "version"),
        (b'{"format": "kimicore-session", "version": 2, "session": []}', "session"),
    ],
    ids=lambda one: repr(one)[:30],
)  # fmt: skip
async def test_what_is_no_session_is_refused(shared: Engine, tmp_path: Path, content: bytes, wanted: str) -> None:
    """Other files, and other versions, are refused with file and field."""
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"bad\.json: .*{wanted}"):
        shared.session(resume=tmp_path / "bad.json")


async def test_a_damaged_file_is_never_taken(file: Path, tmp_path: Path) -> None:
    """A file that was cut off, or in which any bit was turned over, is refused, or says what it said before."""
    whole, good = file.read_bytes(), read_saved(file)
    bad = tmp_path / "bad.json"
    for cut in range(0, len(whole) - 2, 53):
        bad.write_bytes(whole[:cut])
        with pytest.raises(ConfigError, match="bad"):
            read_saved(bad)
    for at in range(len(whole) - 1):
        bad.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        try:
            found = read_saved(bad)
        except ConfigError:
            continue
        assert found == good, at


async def test_only_a_regular_file_of_some_size_is_read(shared: Engine, tmp_path: Path) -> None:
    """Missing files, folders, pipes and files that are too large are refused, and none of them is waited for."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", MAX_BYTES + 1)
    for name, reason in (
        ("none", "No such file"),
        (".", "regular|directory"),
        ("pipe", "regular"),
        ("large", "larger"),
    ):
        with pytest.raises(ConfigError, match=reason):
            shared.session(resume=tmp_path / name)


async def test_ids_over_the_vocabulary_are_refused(shared: Engine, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token ids that the model does not have are refused at the first turn, before any work."""
    monkeypatch.setattr(shared.face.loop, "vocab_tokens", 50)
    with pytest.raises(InvalidRequest, match="token_ids"):
        await shared.session(resume=file).chat("next", max_tokens=1)
