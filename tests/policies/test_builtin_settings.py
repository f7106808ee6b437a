"""Settings of built-in policies of a wrong type or out of range are refused by name, before anything runs."""

from __future__ import annotations

from typing import Any

import pytest

from kimicore.errors import ConfigError
from kimicore.plugins import resolve

SETTINGS = [
    ("batching", "priority", "aging_s"),
    ("eviction", "activity-importance", "half_life_s"),
    ("eviction", "activity-importance", "learn_half_life_s"),
    ("eviction", "activity-importance", "importance_weight"),
    ("eviction", "s3-fifo", "small_share"),
    ("eviction", "s3-fifo", "promote_uses"),
    ("padding", "max-len", "smallest"),
]


@pytest.mark.parametrize("value", ["x", "2", None, [], {}, True, 10**400, float("nan"), -1, 0], ids=repr)
@pytest.mark.parametrize(("kind", "name", "setting"), SETTINGS)
def test_a_setting_that_is_none_is_named(kind: str, name: str, setting: str, value: Any) -> None:
    """The error says which setting of which kind it is, and is no error of Python's own."""
    with pytest.raises(ConfigError, match=rf"policy\.{kind}: {setting}="):
        resolve(kind, name, {setting: value})
