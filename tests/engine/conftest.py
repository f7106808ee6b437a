"""The rigs' engines, made once, and what a request gives when it is alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from kimicore import Choice, Engine, EngineConfig, SyncEngine

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the rigs

from rigs.chain import COUNT, GEMMA_START, START, make_chain
from rigs.tiny import make_tiny

SMALL: dict[str, Any] = {"dtype": "float32", "kv_device_bytes": "8MiB"}


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """The event loops that every asynchronous test runs on."""
    return str(request.param)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny products are slower on two
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny random model."""
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def alone_in() -> Iterator[Callable[[Path], Callable[..., Choice]]]:
    """Return, for a model's folder, what a request gives in an engine without a cache that serves nobody else."""
    known: dict[Any, Choice] = {}
    engines: dict[Path, SyncEngine] = {}

    def of(folder: Path) -> Callable[..., Choice]:
        if folder not in engines:
            engines[folder] = SyncEngine(folder, EngineConfig(prefix_cache=False, **SMALL))

        def run(prompt: Any, index: int = 0, **sampling: Any) -> Choice:
            key = repr((folder, prompt, index, sorted(sampling.items())))
            if key not in known:
                known[key] = engines[folder].generate(prompt, **sampling).choices[index]
            return known[key]

        return run

    yield of
    for engine in engines.values():
        engine.close()


@pytest.fixture(scope="session")
def alone(tiny: Path, alone_in: Callable[[Path], Callable[..., Choice]]) -> Callable[..., Choice]:
    """Return what a request gives alone on the tiny model; each is asked once."""
    return alone_in(tiny)


@pytest.fixture(scope="session")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model whose layers all have a window of 24 tokens."""
    return make_tiny(tmp_path_factory.mktemp("windowed"), model_type="mistral", sliding_window=24)


@pytest.fixture(scope="session")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model with a full layer and one with a window of 24 tokens: two KV classes."""
    window = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
    return make_tiny(tmp_path_factory.mktemp("mixed"), model_type="qwen2", **window)


def _opened(folder: Path, **settings: Any) -> Iterator[Engine]:
    engine = Engine(folder, EngineConfig(**{**SMALL, **settings}))
    anyio.run(engine.open)
    yield engine
    anyio.run(engine.aclose)


@pytest.fixture(scope="session")
def shared(tiny: Path) -> Iterator[Engine]:
    """An engine on the tiny model that tests may share: they leave it idle."""
    yield from _opened(tiny)


@pytest.fixture(scope="session")
def script(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A chain model on SmolLM2's vocabulary; 'Start' begins the first text, 'Count' the second.

    Start, 漏斗图, 잠깐만, the end token; Count, ' one two three four five six', and so on through the vocabulary.
    """
    funnel = [177, 137, 233, 17815, 241, 46309]
    moment = [183, 248, 250, 181, 134, 234, 182, 117, 230]
    numbers = [582, 827, 1296, 1876, 2531, 2976]
    chains = [[START, *funnel, *moment, 2], [COUNT, *numbers, 40_000]]
    yield from _opened(make_chain(tmp_path_factory.mktemp("script"), smollm2_path, chains))


@pytest.fixture(scope="session")
def cycles(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A chain model on SmolLM2's vocabulary: 🧭 for ever; Start, žluťoučký, the end token; Count, 𝄞."""
    compass = [10813, 117, 251]
    yellow = [43421, 1374, 144, 115, 279, 30033, 91, 47546]
    chains = [[*compass, compass[0]], [START, *yellow, 2], [COUNT, 23159, 222, 248, 40_000]]
    yield from _opened(make_chain(tmp_path_factory.mktemp("cycles"), smollm2_path, chains))


@pytest.fixture(scope="session")
def gemma_script(gemma_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A chain model on Gemma's vocabulary with two end tokens: START, ' one', ꙮ in three byte pieces, ' two', end."""
    chains = [[GEMMA_START, 886, 472, 391, 412, 1156, 106], [2, 3017]]
    folder = make_chain(tmp_path_factory.mktemp("gemma"), gemma_path, chains, eos_ids=[1, 106])
    yield from _opened(folder)
