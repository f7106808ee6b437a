"""Settings from a file, and the settings of policies."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest

from kimicore import ConfigError, EngineConfig


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "kimicore.toml"
    path.write_text(text)
    return path


def test_a_file_holds_the_same_settings(tmp_path: Path):
    """Keys of a TOML file are the fields, and its policy tables the policies' own settings."""
    path = _file(
        tmp_path,
        'max_batch_size = 4\nkv_device_bytes = "2MiB"\neviction = "mine"\n[policy.eviction]\nhalf_life_s = 300\n',
    )
    wanted = EngineConfig(
        max_batch_size=4, kv_device_bytes="2MiB", eviction="mine", policy={"eviction": {"half_life_s": 300}}
    )
    assert EngineConfig.from_toml(path) == wanted
    assert EngineConfig.from_toml(str(path)).policy["eviction"]["half_life_s"] == 300


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_batchsize = 4\n", r"kimicore\.toml: 'max_batchsize' is no setting; did you mean 'max_batch_size'\?"),
        ("zzz = 4\n", r"'zzz' is no setting; settings are dtype, device,"),
        ("max_batch_size = 0\n", r"kimicore\.toml: max_batch_size=0: must be from 1"),
        ("max_batch_size = \n", r"kimicore\.toml: is not TOML: .*line 1"),
        ("[policy.evicting]\nx = 1\n", r"policy\.evicting: there is no such kind of policy; kinds are batching, evic"),
        ("policy = 3\n", r"policy=3: must map kinds of policies|policy=3: must map a kind of policy"),
        ("policy.eviction = 3\n", r"policy\.eviction=3: must map names of settings to values"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, message: str):
    """What is wrong in a file is named, and the file with it."""
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_toml(_file(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path):
    """A file that is not there is a ConfigError with its path."""
    with pytest.raises(ConfigError, match=r"nowhere\.toml: cannot be read: No such file"):
        EngineConfig.from_toml(tmp_path / "nowhere.toml")


def test_settings_of_policies_cannot_be_changed_from_outside():
    """The record keeps what it was given when it was made."""
    own: dict[str, Any] = {"half_life_s": 300}
    config = EngineConfig(policy={"eviction": own})
    own["half_life_s"] = 1
    assert config.policy["eviction"]["half_life_s"] == 300
    assert EngineConfig().policy == {}
    assert hash(config) == hash(EngineConfig(policy={"eviction": {}}))


def test_settings_can_be_sent_and_copied():
    """The record survives pickling and copying, as an application that starts processes needs it."""
    config = EngineConfig(max_batch_size=3, policy={"eviction": {"half_life_s": 300}})
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
