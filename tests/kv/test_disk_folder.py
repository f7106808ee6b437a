"""Folders that cannot be used are refused at the start, by name, with the reason and what to do."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kimicore.errors import ConfigError
from kimicore.kv.disk import DiskStore

from .rig import LIMIT, SEGMENT, FaultyFiles, found, numbers, opened, put, segments

Make = Callable[..., DiskStore]
ROOT = os.geteuid() == 0


def refused(folder: Path, match: str, **settings: object) -> None:
    """Opening fails with an error that names the folder, says ``match``, and then says what to do."""
    with pytest.raises(ConfigError, match=match) as caught:
        opened(folder, **settings)  # type: ignore[arg-type]
    text = str(caught.value)
    assert str(folder) in text
    assert "; " in text


def test_a_missing_folder_is_made(tmp_path: Path) -> None:
    """The folder is made with its parents, for its owner alone, and so are its files."""
    folder = tmp_path / "not" / "there" / "yet"
    store = opened(folder)
    put(store, [1])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    store.close()


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    """A path that is a file, or runs through one, is refused (grantjenks/python-diskcache#62)."""
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "name a folder, not a file")
    refused(tmp_path / "file" / "below", "name a folder, not a file")
    assert (tmp_path / "file").read_text() == "x"


def test_a_circle_of_links_is_refused(tmp_path: Path) -> None:
    """A path that leads through links that lead to each other is refused; a link to a folder serves."""
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    refused(tmp_path / "a" / "tier", "circle of links")
    refused(tmp_path / "a", "cannot be created or written")
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    store = opened(tmp_path / "link")
    put(store, [1])
    store.close()
    assert segments(tmp_path / "real")


def test_no_path_is_refused() -> None:
    """An empty path and one with a zero byte are refused as settings are."""
    for path in ("", "a\0b"):
        with pytest.raises(ConfigError, match="is not a path"):
            DiskStore.open(path, LIMIT)


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o720, 0o1777])
def test_a_folder_that_others_can_write_is_refused(folder: Path, mode: int) -> None:
    """Where a group or everybody may write, others could plant blocks."""
    folder.mkdir()
    folder.chmod(mode)
    refused(folder, "other users can write into it")


@pytest.mark.skipif(not ROOT, reason="only root can give a folder away")
def test_another_users_folder_is_refused(folder: Path) -> None:
    """A folder that belongs to another user is refused, although it could be written."""
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, 12345)
    refused(folder, "belongs to another user")


def test_a_folder_that_cannot_be_written_is_refused(folder: Path) -> None:
    """Without the right to write, on a read-only disk and on a full one, the start says so."""
    for code, match in ((errno.EACCES, "Permission denied"), (errno.EROFS, "Read-only"), (errno.ENOSPC, "make room")):
        files = FaultyFiles()
        files.fail("create", code=code)
        refused(folder, match, files=files)
        files.fail("write", code=code)
        refused(folder, match, files=files)


def test_a_read_only_folder_is_refused_for_real() -> None:
    """A user who may not write into the folder, or into its parent, gets the reason from the system."""
    with tempfile.TemporaryDirectory() as parent:
        os.chmod(parent, 0o755)
        own = Path(parent) / "own"
        own.mkdir()
        if ROOT:
            os.chown(own, 65534, 65534)
            os.seteuid(65534)
        try:
            own.chmod(0o500)
            refused(own, "Permission denied; make it writable for this user")
            refused(own / "below", "Permission denied; make it writable for this user")
        finally:
            if ROOT:
                os.seteuid(0)
            own.chmod(0o700)


def test_a_folder_in_use_is_refused(make: Make, folder: Path) -> None:
    """Two stores never share a folder, in one process or two; when the first is closed the second can have it."""
    store = make()
    put(store, [1])
    refused(folder, "another engine or process is using it; close that one")
    code = (
        "import sys; from kimicore.kv.disk import DiskStore\n"
        "try:\n    DiskStore.open(sys.argv[1], 1 << 30)\n"
        "except ValueError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert "another engine or process" in done.stdout
    assert found(store, 1)
    assert found(make(), 1)


def test_another_format_is_refused_and_left_alone(make: Make, folder: Path) -> None:
    """A folder of another format version is not touched; the error says which version it is."""
    put(make(), [1])
    make().close()
    (folder / "FORMAT").write_text("kimicore-kv 2\n")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    refused(folder, "was written in format 2, and this version reads format 1; delete the folder")
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    (folder / "FORMAT").write_text("kimicore-kv 1\n")
    assert found(make(), 1)


@pytest.mark.parametrize("content", [b"", b"kimicore", b"\0" * 4096, os.urandom(5000)])
def test_a_damaged_format_is_written_again(make: Make, folder: Path, content: bytes) -> None:
    """A FORMAT file that says nothing refuses no start: the segments say their version themselves."""
    put(make(), [1])
    make().close()
    (folder / "FORMAT").write_bytes(content)
    assert found(make(), 1)
    assert (folder / "FORMAT").read_bytes() == b"kimicore-kv 1\n"
    (folder / "FORMAT").unlink()
    assert found(make(), 1)


def damaged(secret: Path, how: str) -> None:
    """Damage the secret's file."""
    content = secret.read_bytes()
    secret.unlink()
    if how == "cut":
        secret.write_bytes(content[:-1])
    elif how == "longer":
        secret.write_bytes(content + b"x")
    elif how == "flipped":
        secret.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    elif how == "link":
        secret.symlink_to("elsewhere")
    if how in ("cut", "longer", "flipped"):
        secret.chmod(0o600)


@pytest.mark.parametrize("how", ["removed", "cut", "longer", "flipped", "link"])
def test_a_damaged_secret_is_replaced_and_all_is_dropped(make: Make, folder: Path, how: str) -> None:
    """Without the secret nobody can ask for the old blocks, so they go."""
    store = make()
    put(store, [1])
    old = store.secret
    store.close()
    damaged(folder / "secret", how)
    store = make()
    assert store.secret != old
    assert numbers(store) == []
    assert segments(folder) == []
    put(store, [2])
    again = make()
    assert again.secret == store.secret
    assert found(again, 2)


@pytest.mark.parametrize("limit", [1, SEGMENT, 2 * SEGMENT, 2 * SEGMENT + 8192])
def test_a_limit_under_two_segments_is_refused(folder: Path, limit: int) -> None:
    """A limit that holds no two segments is refused with the least that serves, and that serves."""
    refused(folder, f"limit_bytes={limit} holds no two segments of {SEGMENT} bytes; raise it to", limit=limit)
    with pytest.raises(ConfigError) as caught:
        opened(folder, limit)
    least = int(str(caught.value).split("raise it to ")[1].split()[0])
    with pytest.raises(ConfigError):
        opened(folder, least - 1)
    store = opened(folder, least)
    assert put(store, [1, 2])[1] > 0
    store.close()


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"limit": 0}, "limit_bytes=0"),
        ({"limit": "1GiB"}, "limit_bytes='1GiB'"),
        ({"segment_bytes": 4096}, "segment_bytes=4096"),
        ({"direct": "maybe"}, "direct='maybe'"),
    ],
)
def test_wrong_settings_are_refused(folder: Path, settings: dict[str, object], match: str) -> None:
    """A setting of a wrong type or range is refused by its name."""
    with pytest.raises(ConfigError, match=match):
        opened(folder, **settings)  # type: ignore[arg-type]


def test_what_is_not_ours_is_left_alone(make: Make, folder: Path) -> None:
    """Files of other names, folders and links in the folder are neither read, counted nor removed."""
    make().close()
    (folder / "notes.txt").write_text("mine")
    (folder / "segment-1.kv").write_text("mine")
    (folder / "segment-000000000000000a.kv.bak").write_text("mine")
    (folder / "segment-000000000000000b.kv").mkdir()
    (folder / "segment-000000000000000c.kv").symlink_to("notes.txt")
    os.mkfifo(folder / "segment-000000000000000d.kv")
    put(make(), range(5))
    store = make()
    assert numbers(store) == list(range(5))
    assert (folder / "notes.txt").read_text() == "mine"
    assert len(list(folder.iterdir())) == 6 + 3 + 1


@pytest.mark.parametrize("name", ["FORMAT", "secret", "new.tmp", "segment-0000000000000000.kv", "notes.txt"])
def test_a_folder_of_other_files_is_refused_and_left_as_it_was(make: Make, folder: Path, name: str) -> None:
    """A folder that holds somebody's files and was never a KV cache is refused by name, and nothing in it changes."""
    folder.mkdir(mode=0o700)
    (folder / name).write_text("mine")
    (folder / "more.txt").write_text("mine too")
    with pytest.raises(ConfigError, match="holds files that are no KV cache's"):
        make()
    assert (folder / name).read_text() == "mine"
    assert (folder / "more.txt").read_text() == "mine too"


def test_a_secret_that_others_could_read_is_kept_and_closed(make: Make, folder: Path) -> None:
    """After a copy that lost the modes the blocks are still there, and the secret is the owner's alone again."""
    store = make()
    put(store, [1])
    secret = store.secret
    store.close()
    (folder / "secret").chmod(0o644)
    store = make()
    assert store.secret == secret
    assert found(store, 1)
    assert (folder / "secret").stat().st_mode & 0o777 == 0o600


def test_direct_reads_that_are_wrong_are_not_used(make: Make) -> None:
    """Where a direct read fails in the folder, "auto" reads through the page cache and "on" is refused."""
    files = FaultyFiles()
    for call in ("open_direct", "read_direct"):
        files.fail(call, code=errno.EINVAL)
        with pytest.raises(ConfigError, match=r"direct reads are not to be had: .*EINVAL.*; use direct='auto'"):
            make(files=files, direct="on")
        store = make(files=files, direct="auto")
        assert not store.stats().direct
        put(store, [1])
        assert found(store, 1)
