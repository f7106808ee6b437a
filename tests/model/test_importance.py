"""In which layers attention is measured, what figure becomes of it, and the file that keeps usual figures."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimicore.errors import ConfigError
from kimicore.model import importance_table
from kimicore.model.importance import RECENT_TOKENS, measured_layers, relative_importance
from kimicore.model.importance_table import ImportanceTable, table_path
from kimicore.model.spec import ModelSpec, spec_from_config

LLAMA: dict[str, Any] = {
    "model_type": "qwen2", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
    "hidden_act": "silu", "rope_theta": 10_000.0,
}  # fmt: skip
NAN = math.nan
TABLE = ImportanceTable("ab12", 16, 100, ("full", "window-24"), ((NAN, 1.5, 0.25), (0.5,)))


def spec(layers: int, full: int) -> ModelSpec:
    """A model with so many layers, of which the first ``full`` have full attention and the others a window."""
    window = {"use_sliding_window": full < layers, "sliding_window": 24, "max_window_layers": full}
    return spec_from_config({**LLAMA, "num_hidden_layers": layers, **window})


@pytest.mark.parametrize(
    ("layers", "full", "expected"),
    [
        (1, 1, {0}),
        (2, 2, {0, 1}),
        (4, 4, {0, 1, 2, 3}),
        (30, 30, {3, 11, 18, 26}),
        (2, 1, {0, 1}),
        (18, 3, {0, 1, 2, 6, 14}),
        (12, 0, {3, 9}),
    ],
)
def test_layers_are_spread_over_the_depth(layers: int, full: int, expected: set[int]) -> None:
    """Up to four layers with full attention and two of each window are measured, spread over the depth."""
    assert measured_layers(spec(layers, full)) == expected


@given(
    context=st.integers(1, 2000),
    queries=st.integers(1, 16),
    window=st.none() | st.integers(1, 1500),
    block_tokens=st.sampled_from((16, 32, 64)),
    seed=st.integers(0, 99),
)
def test_values_add_up_to_the_number_of_blocks(
    context: int, queries: int, window: int | None, block_tokens: int, seed: int
) -> None:
    """The values of the compared blocks add up to their number, in proportion to what they got; these are the blocks
    after the first, before what is recent, and wholly within every query's sight."""
    queries = min(queries, context)
    mass = np.random.default_rng(seed).random(-(-context // block_tokens) + 2, np.float32) + 0.01
    found = relative_importance(mass, queries, context, window, block_tokens)
    oldest = context - queries
    compared = [
        at
        for at in range(1, len(mass))
        if (at + 1) * block_tokens <= oldest - RECENT_TOKENS
        and (window is None or at * block_tokens > context - 1 - window)
    ]
    if len(compared) < 2:
        assert found is None
        return
    assert found is not None and found.dtype == np.float32
    assert [at for at, value in enumerate(found) if not math.isnan(value)] == compared
    values = found[compared]
    assert values.sum() == pytest.approx(len(compared), rel=1e-4)
    np.testing.assert_allclose(values / values[0], mass[compared] / mass[compared[0]], rtol=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_no_figure_of_what_is_none(bad: float) -> None:
    """Shares that are no numbers, or that are all zero, give no figure."""
    mass = np.ones(20, np.float32)
    assert relative_importance(mass, 1, 320, None, 16) is not None
    mass[3] = bad
    assert relative_importance(mass, 1, 320, None, 16) is None
    assert relative_importance(np.zeros(20, np.float32), 1, 320, None, 16) is None


# ---------------------------------------------------------------- the file


def read(path: Path, model: str = "ab12", block_tokens: int = 16, classes: Any = ("full", "window-24")) -> Any:
    return ImportanceTable.read(path, model, block_tokens, classes)


def test_round_trip(tmp_path: Path) -> None:
    """A table comes back as it was written, from a file in a folder that are its owner's alone."""
    path = tmp_path / "new" / "table.json"
    for _ in range(2):
        TABLE.write(path)
        found = read(path)
        assert repr(found) == repr(TABLE)
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert list(path.parent.iterdir()) == [path]


def test_the_place_is_the_model_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each model and block size has a file of its own in the cache folder."""
    monkeypatch.setenv("KIMICORE_CACHE", str(tmp_path))
    paths = {table_path("ab", 16), table_path("ab", 32), table_path("ac", 16)}
    assert len(paths) == 3 and {one.parent for one in paths} == {tmp_path / "importance"}


def test_every_cut_and_every_flipped_byte_is_refused(tmp_path: Path) -> None:
    """A file that was cut anywhere is refused, and so is one in which any byte of a value was changed."""
    path = tmp_path / "table.json"
    TABLE.write(path)
    whole = path.read_bytes()
    for size in range(len(whole) - 2):
        path.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"damaged|no importance table"):
            read(path)
    for at in range(len(whole) - 1):
        if whole[at : at + 1].isdigit():
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with pytest.raises(ConfigError, match=r"table\.json"):
                read(path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": 2}, "version 2"),
        ({"format": "another"}, "no importance table"),
        ({"model": "cd"}, "another model"),
        ({"block_tokens": 32}, "blocks of 32 tokens"),
        ({"classes": [{"name": "full", "values": [1.0]}]}, "KV classes full"),
        ({"classes": [{"name": "full", "values": [-1.0]}]}, "damaged"),
        ({"classes": [{"name": "full", "values": [1e30]}]}, "damaged"),
        ({"classes": [{"name": "full", "values": ["1"]}]}, "damaged"),
        ({"classes": [{"name": "full", "values": [True]}]}, "damaged"),
        ({"classes": [{"name": "full"}]}, "damaged"),
        ({"classes": [[]]}, "damaged"),
        ({"classes": 7}, "damaged"),
    ],
    ids=str,
)
def test_foreign_files_are_refused(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    """A table of another version, model, block size or set of classes is refused with the reason, and so is one with
    values that are none, though its digest is right."""
    path = tmp_path / "table.json"
    TABLE.write(path)
    tree = {**json.loads(path.read_text()), **change}
    body = {key: value for key, value in tree.items() if key not in ("format", "version", "digest")}
    path.write_text(json.dumps({**tree, "digest": importance_table._digest(body)}))
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=reason) as caught:
        read(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "7", "[]", "null", "{}", "[" * 100_000, '{"format": NaN}', "\xff", " " * (5 << 20)]
)
def test_what_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    """Any other file is refused without being read to the end."""
    path = tmp_path / "table.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"table\.json.*no importance table"):
        read(path)


def test_a_file_that_others_may_write_is_refused(tmp_path: Path) -> None:
    """A table that others can write is refused, and one that is not there, or that is a folder, is named."""
    path = tmp_path / "table.json"
    with pytest.raises(ConfigError, match="there is no table at"):
        read(path)
    TABLE.write(path)
    path.chmod(0o622)
    with pytest.raises(ConfigError, match="written by other users"):
        read(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path)
    with pytest.raises(ConfigError, match="cannot be written"):
        TABLE.write(path / "below")
    if os.geteuid() == 0:
        path.chmod(0o600)
        os.chown(path, 12345, 12345)
        with pytest.raises(ConfigError, match="another user"):
            read(path)
