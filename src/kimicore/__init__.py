"""KimiCore: an LLM inference engine that runs inside an application.

.. code-block:: python

    import kimicore

    async with kimicore.Engine("smollm2-135m-instruct") as engine:
        result = await engine.generate("Why is the sky blue?", max_tokens=64, temperature=0.0)
        print(result.text)

Importing the package is light: torch and everything else that is heavy is imported when an engine opens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kimicore.config import EngineConfig
from kimicore.errors import (
    ConfigError,
    EngineClosed,
    EngineFailed,
    ForkedProcess,
    InvalidRequest,
    KimiCoreError,
    ModelLoadError,
    Overloaded,
    PluginError,
    PromptTooLong,
    RequestFailed,
    RequestTimeout,
)
from kimicore.sampling_params import SamplingParams
from kimicore.types import (
    Candidate,
    Choice,
    EngineStats,
    GenerationResult,
    Retention,
    StreamChunk,
    Timing,
    TokenLogprob,
    Usage,
)

if TYPE_CHECKING:
    from kimicore.engine import Engine, Stream
    from kimicore.session import Session
    from kimicore.sync import SyncEngine, SyncStream
    from kimicore.sync_session import SyncSession
    from kimicore.turns import SavedSession

__version__ = "0.1.0"

__all__ = [
    "Candidate",
    "Choice",
    "ConfigError",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineFailed",
    "EngineStats",
    "ForkedProcess",
    "GenerationResult",
    "InvalidRequest",
    "KimiCoreError",
    "ModelLoadError",
    "Overloaded",
    "PluginError",
    "PromptTooLong",
    "RequestFailed",
    "RequestTimeout",
    "Retention",
    "SamplingParams",
    "SavedSession",
    "Session",
    "Stream",
    "StreamChunk",
    "SyncEngine",
    "SyncSession",
    "SyncStream",
    "Timing",
    "TokenLogprob",
    "Usage",
    "__version__",
]

_LAZY = {
    "Engine": "kimicore.engine",
    "SavedSession": "kimicore.turns",
    "Session": "kimicore.session",
    "Stream": "kimicore.engine",
    "SyncEngine": "kimicore.sync",
    "SyncSession": "kimicore.sync_session",
    "SyncStream": "kimicore.sync",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
