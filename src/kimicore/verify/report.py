"""What a comparison found, as a record, as JSON and as a table."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Literal, Self

import torch
from attrs import asdict, field, frozen

from kimicore import __version__
from kimicore.errors import ConfigError
from kimicore.verify.tally import Estimate, Measured, Scores

__all__ = ["LEAST", "REPORT_FILE", "ComparedModel", "Metric", "Report", "library_versions", "machine", "verdict"]

Metric = Literal["agreement", "edit"]
LEAST: Final = 0.985
"""What agreement, or edit similarity, has to reach."""
NOISE_MARGIN: Final = 0.005
"""How far under the agreement of bfloat16 a candidate may stay."""
REPORT_FILE: Final = "verify.json"
_FORMAT: Final = "kimicore verify"
_VERSION: Final = 1
_MOST_BYTES: Final = 4 << 20


def _layers(value: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(value))


@frozen
class ComparedModel:
    """A model as it was compared: its name, digest of its weights, and how it was loaded.

    ``skip_layers``: those that it was loaded without, which the digest tells apart as well.
    """

    model: str
    fingerprint: str
    dtype: str
    precision: str
    weight_bytes: int = 0
    skip_layers: tuple[int, ...] = field(default=(), converter=_layers)
    activations: str = "map"

    @property
    def changes(self) -> str:
        """What was left out or switched off in it, in words; empty where nothing was."""
        told = [f"without layers {', '.join(map(str, self.skip_layers))}"] if self.skip_layers else []
        told += [f"with activations={self.activations!r}"] if self.activations != "map" else []
        return ", ".join(told)


@frozen
class Report:
    """The scores of a candidate beside those of the baseline in bfloat16 (``noise``; None: not measured).

    ``by_category``: the candidate's scores by category of text. ``digest``: of prompts and texts. ``new_tokens``:
    length of the continuations. ``libraries`` and ``machine``: what it was measured with.
    """

    baseline: ComparedModel
    candidate: ComparedModel
    scores: Measured
    noise: Measured | None
    metric: Metric
    new_tokens: int
    seed: int
    digest: str
    libraries: Mapping[str, str]
    machine: Mapping[str, Any]

    @property
    def prompts(self) -> int:
        """The number of prompts."""
        return self.scores.all.prompts

    @property
    def by_category(self) -> Mapping[str, Scores]:
        """The candidate's scores by category of text."""
        return self.scores.by_category

    @property
    def passed(self) -> bool:
        """Whether the candidate is as good as the baseline, by the metric."""
        return verdict(self.scores, self.noise, self.metric)[0]

    @property
    def reason(self) -> str:
        """Why it passed or failed, in one sentence."""
        return verdict(self.scores, self.noise, self.metric)[1]

    # ------------------------------------------------------------ forms

    def to_json(self) -> str:
        """Return the report as a JSON object, whose fields ``docs/verify.md`` describes."""
        tree = {
            "format": _FORMAT,
            "version": _VERSION,
            "passed": self.passed,
            "reason": self.reason,
            "metric": self.metric,
            "prompts": self.prompts,
            "new_tokens": self.new_tokens,
            "seed": self.seed,
            "digest": self.digest,
            "baseline": asdict(self.baseline),
            "candidate": asdict(self.candidate),
            "scores": self.scores.to_dict(),
            "noise": None if self.noise is None else self.noise.to_dict(),
            "libraries": dict(self.libraries),
            "machine": dict(self.machine),
        }
        return json.dumps(tree, indent=1, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Return the report of such an object; raises :class:`~kimicore.ConfigError` for anything else."""
        try:
            tree = json.loads(text)
            if tree["format"] != _FORMAT or tree["version"] != _VERSION:
                raise ValueError(f"format {tree['format']!r}, version {tree['version']!r}")
            if tree["metric"] not in ("agreement", "edit"):
                raise ValueError(f"metric {tree['metric']!r}")
            return cls(
                ComparedModel(**tree["baseline"]),
                ComparedModel(**tree["candidate"]),
                _measured(tree["scores"]),
                None if tree["noise"] is None else _measured(tree["noise"]),
                tree["metric"],
                *(tree[key] for key in ("new_tokens", "seed", "digest", "libraries", "machine")),
            )
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise ConfigError(f"is no report of kimicore verify, or damaged: {error!r:.200}") from error

    def write(self, path: Path) -> None:
        """Write the report as JSON, whole or not at all; raises :class:`~kimicore.ConfigError`."""
        try:
            handle, name = tempfile.mkstemp(prefix=".verify-", dir=path.parent)
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(self.to_json() + "\n")
                os.chmod(name, 0o644)
                os.replace(name, path)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the report of a file; raises :class:`~kimicore.ConfigError` that names it."""
        try:
            with path.open("rb") as file:
                content = file.read(_MOST_BYTES + 1)
            if len(content) > _MOST_BYTES:
                raise ConfigError(f"has over {_MOST_BYTES} bytes")
            return cls.from_json(content)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    def table(self) -> str:
        """Return the scores as a table for people, the verdict below it."""
        lines: list[tuple[str, ...]] = [("", "prompts", "agreement", "95 %", "KL", "edit", "perplexity", "baseline's")]
        for key, scores in {**self.by_category, "all": self.scores.all}.items():
            lines.append((key, *_cells(scores)))
        if self.noise is not None:
            lines.append(("bfloat16", *_cells(self.noise.all)))
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        shown = [
            "  ".join(cell.rjust(width) if at else cell.ljust(width) for at, (cell, width) in enumerate(pairs)).rstrip()
            for line in lines
            for pairs in [list(zip(line, widths, strict=True))]
        ]
        changes = [f"{self.candidate.model} {self.candidate.changes}"] if self.candidate.changes else []
        return "\n".join([*shown, "", *changes, f"{'pass' if self.passed else 'FAIL'}: {self.reason}"])


def verdict(scores: Measured, noise: Measured | None, metric: Metric = "agreement") -> tuple[bool, str]:
    """Return whether a candidate of these scores passes, and why in one sentence.

    ``noise``: the scores of the baseline in bfloat16; None: the candidate has to reach 98.5 % by itself.
    """
    if metric == "edit":
        return _edit_verdict(scores, noise)
    value = scores.all.agreement.value
    if value >= LEAST:
        return True, f"agreement {value:.2%} is at least {LEAST:.1%}"
    worst = scores.worst
    weakest = f"least in {worst} ({scores.by_category[worst].agreement.value:.2%})"
    if noise is None:
        return False, f"agreement {value:.2%} is under {LEAST:.1%}; {weakest}"
    floor = noise.all.agreement.value
    beside = f"bfloat16's {floor:.2%} less {100 * NOISE_MARGIN:.1f} points"
    if value >= floor - NOISE_MARGIN:
        return True, f"agreement {value:.2%} is at least {beside}"
    return False, f"agreement {value:.2%} is under {LEAST:.1%} and under {beside}; {weakest}"


def _edit_verdict(scores: Measured, noise: Measured | None) -> tuple[bool, str]:
    found = scores.all.edit
    if found is None:
        return False, "edit similarity was not measured"
    if found.value >= LEAST:
        return True, f"edit similarity {found.value:.2%} is at least {LEAST:.1%}"
    own = None if noise is None else noise.all.edit
    text = f"edit similarity {found.value:.2%} is under {LEAST:.1%}"
    if own is not None and own.value < LEAST:
        text += f", which bfloat16 does not reach either ({own.value:.2%}): this model needs the metric agreement"
    return False, text


def _cells(scores: Scores) -> tuple[str, ...]:
    agreement = scores.agreement
    edit = "-" if scores.edit is None else f"{scores.edit.value:.1%}"
    texts = ["-" if one is None else f"{one:.3f}" for one in (scores.perplexity, scores.baseline_perplexity)]
    bounds = f"{agreement.low:.2%} to {agreement.high:.2%}"
    return (str(scores.prompts), f"{agreement.value:.2%}", bounds, f"{scores.kl.value:.5f}", edit, *texts)


def _measured(tree: Mapping[str, Any]) -> Measured:
    return Measured(_scores(tree["all"]), {str(key): _scores(one) for key, one in tree["by_category"].items()})


def _scores(tree: Mapping[str, Any]) -> Scores:
    parts = dict(tree)
    for name in ("agreement", "kl", "edit"):
        if parts[name] is not None:
            parts[name] = Estimate(**{key: float(one) for key, one in parts[name].items()})
    return Scores(**parts)


def library_versions() -> dict[str, str]:
    """Return the versions of what computes."""
    return {"kimicore": __version__, **{one: metadata.version(one) for one in ("torch", "numpy", "tokenizers")}}


def machine() -> dict[str, Any]:
    """Return what the figures were computed on."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "vector_units": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
