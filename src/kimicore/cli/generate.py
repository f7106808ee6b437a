"""``kimicore generate``: continue one prompt, or answer it."""

from __future__ import annotations

import argparse
import json
import sys

from kimicore.cli.options import Progress, add_engine_options, add_sampling_options, engine_config, sampling
from kimicore.errors import InvalidRequest
from kimicore.sampling_params import SamplingParams
from kimicore.sync import SyncEngine
from kimicore.types import GenerationResult

__all__ = ["add_parser", "run"]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("generate", help="continue a prompt, or answer it with --chat")
    parser.add_argument("prompt", help="the prompt; - reads it from standard input")
    parser.add_argument("--chat", action="store_true", help="send the prompt as a user's message")
    parser.add_argument("--system", help="system message, with --chat")
    parser.add_argument("--stats", action="store_true", help="print counts and times on standard error")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    add_engine_options(parser)
    add_sampling_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    if options.system is not None and not options.chat:
        raise InvalidRequest("--system goes with --chat: a plain prompt has no system message")
    SamplingParams.of(None, sampling(options))  # refused before the model is loaded
    progress = Progress(options.quiet)
    with SyncEngine(options.model, engine_config(options), progress=progress) as engine:
        progress.clear()
        if options.chat:
            system = [] if options.system is None else [{"role": "system", "content": options.system}]
            stream = engine.stream_chat([*system, {"role": "user", "content": prompt}], **sampling(options))
        else:
            stream = engine.stream(prompt, **sampling(options))
        text: list[str] = []
        reason = None
        with stream:
            for chunk in stream:
                text.append(chunk.text)
                reason = chunk.finish_reason or reason
                if not options.json:
                    print(chunk.text, end="", flush=True)
            total = stream.result()
    if options.json:
        print(json.dumps({"text": "".join(text), "finish_reason": reason, **_figures(total)}, ensure_ascii=False))
    else:
        print()
    if options.stats:
        print(json.dumps(_figures(total)), file=sys.stderr)
    return 0


def _figures(total: GenerationResult) -> dict[str, float]:
    usage, timing = total.usage, total.timing
    return {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "queue_s": round(timing.queue_s, 4),
        "ttft_s": round(timing.ttft_s, 4),
        "total_s": round(timing.total_s, 4),
    }
