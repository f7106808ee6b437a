"""``kimicore chat``: a conversation in the terminal."""

from __future__ import annotations

import argparse
import sys

from kimicore.cli.options import Progress, add_engine_options, add_sampling_options, engine_config, sampling
from kimicore.errors import EngineClosed, EngineFailed, KimiCoreError
from kimicore.sampling_params import SamplingParams
from kimicore.sync import SyncEngine

__all__ = ["add_parser", "run"]

HELP = "/reset forgets the conversation, /quit (or Ctrl-D) ends it, Ctrl-C stops an answer."


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("chat", help="talk with a model; answers stream as they come")
    parser.add_argument("--system", help="system message")
    add_engine_options(parser)
    add_sampling_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command: reads a line, streams the answer, until the input ends."""
    SamplingParams.of(None, sampling(options))  # refused before the model is loaded
    progress = Progress(options.quiet)
    start = [] if options.system is None else [{"role": "system", "content": options.system}]
    messages = list(start)
    with SyncEngine(options.model, engine_config(options), progress=progress) as engine:
        progress.clear()
        if sys.stdin.isatty():
            print(HELP, file=sys.stderr)
        while (line := _read()) is not None:
            if line == "/quit":
                break
            if line == "/reset":
                messages = list(start)
            elif line:
                messages.append({"role": "user", "content": line})
                answer = _answer(engine, messages, options)
                if answer is None:
                    messages.pop()
                else:
                    messages.append({"role": "assistant", "content": answer})
    return 0


def _read() -> str | None:
    """Return the next line without its end, or None at the end of the input or on Ctrl-C."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        if sys.stdin.isatty():
            print()
        return None


def _answer(engine: SyncEngine, messages: list[dict[str, str]], options: argparse.Namespace) -> str | None:
    """Print the answer as it comes and return it; None where there was none, so that the turn is forgotten.

    Ctrl-C ends the answer and keeps what was shown.
    """
    parts: list[str] = []
    try:
        with engine.stream_chat(messages, **sampling(options)) as stream:
            for chunk in stream:
                parts.append(chunk.text)
                print(chunk.text, end="", flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    except (EngineClosed, EngineFailed):
        raise
    except KimiCoreError as error:
        print(f"kimicore: {type(error).__name__}: {error}", file=sys.stderr)
        return None
    print()
    return "".join(parts)
