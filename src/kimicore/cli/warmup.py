"""``kimicore warmup``: how much attention blocks get by their place, for engines that do not measure it yet."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from attrs import define, field

from kimicore.cli.options import DEMO, Progress, add_skip_layers_option, check_writable, skipped_layers
from kimicore.config import EngineConfig
from kimicore.contracts import Runner
from kimicore.errors import ConfigError, InvalidRequest
from kimicore.sync import SyncEngine
from kimicore.types import BoundStep, StepResult

__all__ = ["AttentionNotes", "add_parser", "beginnings", "run"]

CHUNK_TOKENS = 64
"""Tokens of a step: attention is measured at the end of each chunk of a prompt, so from many places of a text."""
BATCH = 16
LEAST_SAMPLES = 8
"""A place that fewer samples reach has no value (fewer where there are fewer samples)."""

_OPENINGS = (
    "Here is a short story about {}. Once upon a time",
    "{} explained in simple words:",
    "Dear friend, yesterday I thought again about {}, and",
    "A list of ten facts about {}:\n1.",
    "Question: what should everybody know about {}?\nAnswer:",
    "The history of {} begins",
    "Two neighbours talked about {}. The first one said:",
    "How to begin with {}, step by step.\n\nStep 1:",
    "Most people are wrong about {}. The truth is that",
    "Notes from a lecture on {}.\n\nSummary:",
)
_TOPICS = (
    "the sea", "bread", "bicycles", "the human heart", "railways", "prime numbers", "winter", "music", "money", "bees",
)  # fmt: skip


def beginnings(count: int) -> list[str]:
    """Return ``count`` short texts to be continued; after the first hundred they come again."""
    texts = [opening.format(topic) for topic in _TOPICS for opening in _OPENINGS]
    return [texts[at % len(texts)] for at in range(count)]


@define(eq=False)
class AttentionNotes:
    """A runner around another one that notes what is measured, as a mean for each request, class and block."""

    runner: Runner
    sums: dict[int, list[dict[int, tuple[float, int]]]] = field(factory=dict)

    def run(self, step: BoundStep) -> StepResult:
        """Run the step."""
        result = self.runner.run(step)
        for row, found in zip(step.rows, result.importance or (), strict=False):
            if found is None:
                continue
            sums = self.sums.setdefault(row.plan.request, [{} for _ in found])
            for own, values in zip(sums, found, strict=True):
                for block, value in enumerate(() if values is None else values):
                    if value == value:
                        total, count = own.get(block, (0.0, 0))
                        own[block] = total + float(value), count + 1
        return result

    def close(self) -> None:
        """Close the runner inside."""
        self.runner.close()

    def table(self, kind: int) -> tuple[float, ...]:
        """Return a class's values by block: the mean over requests of each one's own mean; NaN where few tell."""
        means: dict[int, list[float]] = {}
        for sums in self.sums.values():
            for block, (total, count) in sums[kind].items():
                means.setdefault(block, []).append(total / count)
        least = min(LEAST_SAMPLES, len(self.sums))
        told = {block: sum(own) / len(own) for block, own in means.items() if len(own) >= least}
        return tuple([told.get(block, math.nan) for block in range(max(told, default=-1) + 1)])


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "warmup", help="measure how much attention blocks get by their place, for engines with importance='table'"
    )
    parser.add_argument("model", nargs="?", default=DEMO, help=f"alias, folder, GGUF file or hub id (default {DEMO})")
    parser.add_argument("--samples", type=int, default=100, metavar="N", help="texts to measure (100)")
    parser.add_argument("--tokens", type=int, default=512, metavar="N", help="tokens of each text at most (512)")
    parser.add_argument("--text", metavar="FILE", help="read the texts from a file, not from the model's own words")
    parser.add_argument("--out", metavar="FILE", help="write the table there, not to the cache folder")
    parser.add_argument("--block-tokens", type=int, default=16, metavar="N", help="tokens of a KV block (16)")
    add_skip_layers_option(parser)
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress on standard error")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    if options.samples < 1:
        raise ConfigError(f"--samples={options.samples}: must be at least 1")
    config = EngineConfig(
        dtype=options.dtype,
        skip_layers=skipped_layers(options),
        threads=options.threads,
        max_batch_size=BATCH,
        max_batch_tokens=CHUNK_TOKENS,
        block_tokens=options.block_tokens,
        importance="attention",
        importance_every=1,
    )
    if options.tokens < 4 * config.block_tokens:
        raise ConfigError(f"--tokens={options.tokens}: must be at least {4 * config.block_tokens}, four blocks")
    if options.out is not None:
        check_writable(options.out)
    text = None if options.text is None else _read(options.text)
    # torch: only once the options are known to be right
    from kimicore.assembly import choose_dtype
    from kimicore.model.importance_table import ImportanceTable, table_path
    from kimicore.model.kv_layout import kv_classes
    from kimicore.model.load import open_source
    from kimicore.model.skipping import without_layers
    from kimicore.model.spec import spec_from_config

    source = without_layers(open_source(options.model), config.skip_layers)
    path = table_path(source.fingerprint, config.block_tokens) if options.out is None else Path(options.out)
    spec = spec_from_config(source.config)
    classes = kv_classes(spec, str(choose_dtype(config.dtype)).removeprefix("torch."), config.block_tokens)
    progress = Progress(options.quiet)
    with SyncEngine(options.model, config, progress=progress) as engine:
        notes = _measure(engine, options, text, progress)
        progress.clear()
    names = tuple([one.name for one in classes])
    values = tuple([notes.table(kind) for kind in range(len(classes))])
    ImportanceTable(source.fingerprint, config.block_tokens, len(notes.sums), names, values).write(path)
    for name, own in zip(names, values, strict=True):
        known = [one for one in own if one == one]
        least, most = min(known, default=math.nan), max(known, default=math.nan)
        print(f"{name}: {len(known)} blocks, from {least:.2f} to {most:.2f}")
    print(f"{len(notes.sums)} samples, written to {path}")
    return 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {path}: cannot be read: {error}") from error


def _measure(engine: SyncEngine, options: argparse.Namespace, text: str | None, progress: Progress) -> AttentionNotes:
    """Run all samples through the engine and return what was measured."""
    engine.open()
    loop = engine.face.loop
    tokens, least = min(options.tokens, loop.limit_tokens), 4 * engine.config.block_tokens
    if text is None:
        prompts = [loop.tokenizer.encode(one)[: tokens - 1] for one in beginnings(options.samples)]
    else:
        whole = loop.tokenizer.encode(text)
        pieces = [whole[at : at + tokens] for at in range(0, len(whole), tokens)]
        prompts = [one for one in pieces if len(one) >= least][: options.samples]
        if not prompts:
            raise InvalidRequest(f"--text {options.text}: has {len(whole)} tokens; at least {least} are needed")
    notes = AttentionNotes(loop.runner)
    loop.runner = notes
    try:
        for first in range(0, len(prompts), BATCH):
            progress("measuring attention", first, len(prompts))
            batch = prompts[first : first + BATCH]
            wanted = 1 if text is not None else tokens - max([len(one) for one in batch])
            engine.generate_many(batch, max_tokens=wanted, seed=first, temperature=1.0, ignore_eos=True)
    finally:
        loop.runner = notes.runner
    return notes
