"""The native kernels are built once, safely, and never stand in the way where they cannot be built."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kimicore.errors import ConfigError
from kimicore.kernels import build, registry

SOURCE = Path(build.__file__).with_name("gated_act") / "gated_act.cpp"
OPERATIONS = {
    "linear", "rms_norm", "rotary_write", "gated_act", "paged_attention", "block_mass", "gumbel", "key_summary",
    "choose_blocks", "kv_quantize", "quantized_attention", "packed_linear", "packed_linear_int8",
    "packed_rows", "arrange",
}  # fmt: skip
HAS_COMPILER = any(shutil.which(name) for name in ("c++", "g++", "clang++"))
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="this machine has no C++ compiler")

BUILD = """
import sys
from pathlib import Path
from kimicore.kernels.build import build_library
library = build_library(Path(sys.argv[1]))
assert library.handle, library.reason
"""
DESCRIBE = """
import json, torch
from kimicore.kernels.registry import describe, select_ops
rows = [describe(select_ops("cpu", dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
print(json.dumps(rows))
"""


def environ(tmp_path: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "KIMICORE_CACHE": str(tmp_path), **more}


def described(tmp_path: Path, **more: str) -> list[list[tuple[str, str, str]]]:
    """What the table of operations says in a process of its own, for float32, bfloat16 and float16."""
    command = [sys.executable, "-W", "error", "-c", DESCRIBE]
    done = subprocess.run(command, env=environ(tmp_path, **more), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows: list[list[tuple[str, str, str]]] = json.loads(done.stdout)
    return rows


@needs_compiler
def test_built_once(tmp_path: Path) -> None:
    """A library is compiled on first use and found in the cache afterwards, in a folder of the owner alone."""
    first = build.build_library(SOURCE, environ=environ(tmp_path))
    assert first.handle is not None, first.reason
    (found,) = (tmp_path / "native").iterdir()
    assert found.name.startswith("gated_act-") and (tmp_path / "native").stat().st_mode & 0o777 == 0o700
    stamp = found.stat().st_mtime_ns
    assert build.build_library(SOURCE, environ=environ(tmp_path)).handle is not None
    assert [p.stat().st_mtime_ns for p in (tmp_path / "native").iterdir()] == [stamp]


@needs_compiler
def test_damaged_library_is_rebuilt(tmp_path: Path) -> None:
    """A library that cannot be loaded is compiled again."""
    run = [sys.executable, "-c", BUILD, str(SOURCE)]
    subprocess.run(run, env=environ(tmp_path), check=True)
    (found,) = (tmp_path / "native").iterdir()
    found.write_bytes(b"not a library")
    subprocess.run(run, env=environ(tmp_path), check=True)
    assert found.stat().st_size > 1000


@needs_compiler
def test_processes_may_build_at_once(tmp_path: Path) -> None:
    """Processes that build the same library at once all load it, and leave nothing else behind."""
    running = [subprocess.Popen([sys.executable, "-c", BUILD, str(SOURCE)], env=environ(tmp_path)) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert len(list((tmp_path / "native").iterdir())) == 1


def test_without_a_compiler_torch_serves(tmp_path: Path) -> None:
    """With no compiler every operation is torch's, nothing fails or warns, and the table says why."""
    for rows in described(tmp_path, CXX="no-such-compiler"):
        assert {op for op, _, _ in rows} == OPERATIONS
        assert all(implementation != "native" and "no native" in why for _, implementation, why in rows)
        assert any("no-such-compiler" in why for _, _, why in rows)


@pytest.mark.parametrize(
    ("cxx", "reason"), [("false", "failed"), ("sleep 60 #", "took over 0.2 s"), ("nope", "not there"), ("'", "")]
)
def test_broken_compiler_is_a_reason(tmp_path: Path, cxx: str, reason: str) -> None:
    """A compiler that fails, hangs or is missing gives no library and its reason, and no exception."""
    script = tmp_path / "slow"
    script.write_text("#!/bin/sh\nsleep 60\n")
    script.chmod(0o755)
    cxx = str(script) if cxx.startswith("sleep") else cxx
    library = build.build_library(SOURCE, environ=environ(tmp_path, CXX=cxx), limit_s=0.2 if "slow" in cxx else 60)
    assert library.handle is None and reason in library.reason and library.reason


@needs_compiler
def test_faulty_source_is_a_reason(tmp_path: Path) -> None:
    """A source that does not compile gives the compiler's first error."""
    source = tmp_path / "broken" / "broken.cpp"
    source.parent.mkdir()
    source.write_text("int f( { }\n")
    library = build.build_library(source, environ=environ(tmp_path))
    assert library.handle is None and "error" in library.reason
    assert not list((tmp_path / "native").iterdir())


@needs_compiler
def test_cache_that_cannot_be_used_is_a_reason(tmp_path: Path) -> None:
    """A cache that cannot be written, or that others can write into, gives no library and the reason."""
    (tmp_path / "file").write_text("")
    library = build.build_library(SOURCE, environ=environ(tmp_path / "file"))
    assert library.handle is None and str(tmp_path / "file") in library.reason
    (tmp_path / "native").mkdir()
    (tmp_path / "native").chmod(0o777)
    library = build.build_library(SOURCE, environ=environ(tmp_path))
    assert library.handle is None and "written by other users" in library.reason


def test_cache_folder() -> None:
    """The cache is KIMICORE_CACHE's, else the user's own."""
    assert build.cache_folder({"KIMICORE_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a/native")
    assert build.cache_folder({"XDG_CACHE_HOME": "/b"}) == Path("/b/kimicore/native")
    assert build.cache_folder({}) == Path.home() / ".cache" / "kimicore" / "native"


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_one_openmp_runtime() -> None:
    """With every native kernel loaded, the process has one OpenMP runtime, torch's: the kernels bring none."""
    program = (  # in a process of its own: other test packages bring runtimes of theirs
        "import pathlib, torch\n"
        "from kimicore.kernels import registry\n"
        "registry.select_ops('cpu', torch.float32)\n"
        "registry.select_ops('cpu', torch.bfloat16)\n"
        "print(pathlib.Path('/proc/self/maps').read_text())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    maps = [line for line in done.stdout.splitlines() if line.strip()]
    libraries = {line.split()[-1] for line in maps if any(n in line for n in ("libgomp", "libiomp", "libomp"))}
    assert len(libraries) == 1, libraries


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names x86-64 processors")
@pytest.mark.parametrize("level", ["x86-64", "x86-64-v3"])
def test_other_processors(tmp_path: Path, level: str) -> None:
    """Compiled for lesser processors, the kernels still agree with their references, and are chosen."""
    wrapper = tmp_path / "compiler"
    wrapper.write_text(f'#!/bin/bash\nexec c++ "${{@/-march=native/-march={level}}}"\n')
    wrapper.chmod(0o755)
    single, half, _ = described(tmp_path, CXX=str(wrapper))
    seldom = {"packed_linear_int8"}  # needs matrix tiles of bytes
    assert {op for op, implementation, _ in single if implementation == "native"} == OPERATIONS - seldom, single
    served = OPERATIONS - seldom if level == "x86-64-v3" else OPERATIONS - seldom - {"linear"}
    assert {op for op, implementation, _ in half if implementation == "native"} == served, half


def test_table_of_operations() -> None:
    """The table names an implementation and a reason for every operation, and keeps to torch when told to."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        ops = registry.select_ops("cpu", dtype)
        assert {op for op, _, _ in registry.describe(ops)} == OPERATIONS
        assert all(implementation and why for _, implementation, why in registry.describe(ops))
        plain = registry.describe(registry.select_ops("cpu", dtype, native=False, shapes=[(32, 16)]))
        assert all(implementation != "native" and "turned off" in why for _, implementation, why in plain)


def test_refuses_what_it_does_not_serve() -> None:
    """An unknown device or type is refused by name."""
    with pytest.raises(ConfigError, match="cuda"):
        registry.select_ops("cuda", torch.float32)
    with pytest.raises(ConfigError, match="float64"):
        registry.select_ops("cpu", torch.float64)
