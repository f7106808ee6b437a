"""Every error that KimiCore raises on purpose, in one tree.

.. code-block:: text

    KimiCoreError
    ├── ConfigError (ValueError)          a setting is out of range or conflicts with another
    ├── ModelLoadError                    a model folder, file or download cannot be used
    ├── InvalidRequest (ValueError)       one request cannot be served as it was asked
    │   └── PromptTooLong                 the prompt does not fit; the figures are in the error
    ├── Overloaded                        the engine is full; try again after ``retry_after_s``
    ├── RequestTimeout (TimeoutError)     a request's own time limit passed
    ├── RequestFailed                     one request failed inside a step; others go on
    ├── EngineClosed                      the engine was closed, or never opened
    │   └── ForkedProcess                 the engine was made in another process
    ├── EngineFailed                      the engine's step failed; every request ends with the cause
    └── PluginError                       a policy is missing, broken or broke its promise

A wrong argument *type* raises :class:`TypeError` subclasses nowhere: it is an :class:`InvalidRequest`
or :class:`ConfigError` as well, so that one ``except KimiCoreError`` is enough around a call.
"""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "EngineClosed",
    "EngineFailed",
    "ForkedProcess",
    "InvalidRequest",
    "KimiCoreError",
    "ModelLoadError",
    "Overloaded",
    "PluginError",
    "PromptTooLong",
    "RequestFailed",
    "RequestTimeout",
]


class KimiCoreError(Exception):
    """Root of everything this package raises on purpose."""


class ConfigError(KimiCoreError, ValueError):
    """A setting is out of range, or conflicts with another one."""


class ModelLoadError(KimiCoreError):
    """A model cannot be loaded; the message names the file and the field."""


class InvalidRequest(KimiCoreError, ValueError):
    """One request is wrong; nothing was computed for it and no other request is touched."""


class PromptTooLong(InvalidRequest):
    """The prompt does not fit.

    ``prompt_tokens`` is the prompt's length (or the least it can have, where it was refused before
    it was tokenized as a whole) and ``limit_tokens`` the longest prompt that this engine takes.
    """

    def __init__(self, message: str, *, prompt_tokens: int, limit_tokens: int) -> None:
        super().__init__(message)
        self.prompt_tokens = prompt_tokens
        self.limit_tokens = limit_tokens


class Overloaded(KimiCoreError):
    """The waiting queue is full; ``retry_after_s`` is the engine's estimate of when to try again."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestTimeout(KimiCoreError, TimeoutError):
    """The request's ``timeout_s`` passed before it was finished."""


class RequestFailed(KimiCoreError):
    """This request failed inside a step (non-finite logits, for example); others go on."""


class EngineClosed(KimiCoreError):
    """The engine is closed, is closing, or was never opened."""


class ForkedProcess(EngineClosed):
    """The process was forked after an engine had opened: start it with spawn, or fork before the first engine opens."""


class EngineFailed(KimiCoreError):
    """A step of the engine failed. ``__cause__`` is the reason; the engine takes no more work."""


class PluginError(KimiCoreError):
    """A policy is missing, cannot be imported, or broke its promise."""
