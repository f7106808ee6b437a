"""Traces are read in their own formats, written in ours, and refused by line where they are wrong."""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimicore.errors import ConfigError
from kimicore.sim.traces import TraceRequest, read_trace, write_trace
from kimicore.types import TIERS

MOONCAKE = (
    '{"timestamp": 27, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 7]}\n'
    '{"timestamp": 3000, "input_length": 512, "output_length": 9, "hash_ids": [0]}\n'
)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
)


@st.composite
def requests(draw: Any) -> TraceRequest:
    """Any request that a trace may hold."""
    prompt, size = draw(st.integers(1, 5000)), draw(st.integers(1, 600))
    ids = draw(st.lists(st.integers(0, 1 << 60), max_size=min(5, -(-prompt // size))))
    return TraceRequest(
        draw(st.floats(0.0, 1e6)),
        prompt,
        draw(st.integers(1, 5000)),
        tuple(ids),
        size if ids else 0,
        draw(st.sampled_from([None, *TIERS])),
        draw(st.text(st.characters(codec="utf-8"), max_size=8)),
        draw(st.integers(-5, 5)),
    )


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.xz", "trace.jsonl.gz"])
@given(found=st.lists(requests(), min_size=1, max_size=6))
def test_what_is_written_is_read(
    name: str, found: list[TraceRequest], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Our own format keeps every field, compressed or not, in the order of arrival."""
    path = tmp_path_factory.getbasetemp() / name
    write_trace(path, found)
    assert read_trace(path) == sorted(found, key=lambda one: one.arrived_s)


@pytest.mark.parametrize("opener", [open, lzma.open, gzip.open, bz2.open])
def test_mooncake_is_read(opener: Callable[..., Any], tmp_path: Path) -> None:
    """Milliseconds become seconds, ids stand for 512 tokens, and a compressed file is told by its content."""
    path = tmp_path / "trace"
    with opener(path, "wt") as file:
        file.write(MOONCAKE)
    assert read_trace(path) == [
        TraceRequest(0.027, 1030, 5, (0, 1, 7), 512),
        TraceRequest(3.0, 512, 9, (0,), 512),
    ]


def test_azure_is_read(tmp_path: Path) -> None:
    """Times count from the first line, to the microsecond."""
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    first, second = read_trace(path)
    assert (first.arrived_s, first.prompt_tokens, first.output_tokens) == (0.0, 374, 44)
    assert (second.arrived_s, second.prompt_tokens, second.output_tokens) == (pytest.approx(4.314579), 396, 109)


@pytest.mark.parametrize("text", [MOONCAKE, AZURE])
def test_a_limit_takes_the_first_requests(text: str, tmp_path: Path) -> None:
    """A header is not a request."""
    path = tmp_path / "trace"
    path.write_text(text)
    assert read_trace(path, limit=1) == read_trace(path)[:1]


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        (MOONCAKE + '{"timestamp": 1, "input_length": 5}\n', 3, "output_length"),
        (MOONCAKE + '{"timestamp": -1, "input_length": 5, "output_length": 1, "hash_ids": []}\n', 3, "timestamp"),
        (MOONCAKE + '{"timestamp": 1, "input_length": 0, "output_length": 1, "hash_ids": []}\n', 3, "input_length=0"),
        (MOONCAKE + '{"timestamp": 1, "input_length": 5, "output_length": -1}\n', 3, "output_length=-1"),
        (
            MOONCAKE + '{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": [1, 2]}\n',
            3,
            "than input_length=5 has",
        ),
        (
            MOONCAKE + '{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": ["a"]}\n',
            3,
            "hash_ids: ids must be integers",
        ),
        (MOONCAKE + "\nnot json\n", 4, "Expecting value"),
        (AZURE + "2023-11-16 18:15:51,5\n", 4, "2 columns"),
        (AZURE + "yesterday,5,5\n", 4, "TIMESTAMP='yesterday'"),
        (AZURE + "2223-11-16 18:15:51,5,5\n", 4, "TIMESTAMP="),
        (AZURE + "2023-11-16 18:15:51,5,no\n", 4, "GeneratedTokens='no'"),
        (AZURE + "2023-11-16 18:15:51,-10,5\n", 4, "ContextTokens=-10"),
        (AZURE + "2023-11-16 18:15:01,5,5\n", 4, "before"),
        ("a,b,c\n1,2,3\n", 1, "TIMESTAMP"),
        ('{"hello": 1}\n', 1, "arrived_s"),
        ('{"arrived_s": 1.0, "prompt_tokens": 5}\n', 1, "output_tokens"),
        ('{"arrived_s": 1.0, "prompt_tokens": 5, "output_tokens": 1, "tiers": 3}\n', 1, "tiers"),
        ('{"arrived_s": 1.0, "prompt_tokens": 5, "output_tokens": 1, "tier": "urgent"}\n', 1, "urgent"),
        ('{"arrived_s": 1e999, "prompt_tokens": 5, "output_tokens": 1}\n', 1, "arrived_s"),
        ("[1, 2]\n", 1, "TIMESTAMP"),
        ('{"timestamp":' + "[" * 100_000, 1, "nested too deeply"),
        (MOONCAKE + '{"timestamp":' + "[" * 100_000, 3, "nested too deeply"),
    ],
)
def test_a_wrong_line_is_named(text: str, where: int, what: str, tmp_path: Path) -> None:
    """The error names file, line and what is wrong."""
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"trace:{where}: ") as caught:
        read_trace(path)
    assert what in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xfd7zXZ\x00broken", b"\xff\xfe\x00", AZURE[:40].encode()])
def test_a_file_without_requests_is_refused(content: bytes, tmp_path: Path) -> None:
    """Nothing, a broken archive and other bytes are a typed error."""
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="trace"):
        read_trace(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    """The error names the path, for reading and for writing."""
    with pytest.raises(ConfigError, match="nowhere"):
        read_trace(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="nowhere"):
        write_trace(tmp_path / "nowhere" / "file", [TraceRequest(0.0, 1, 1)])
