"""``kimicore``: generate, chat and look at what this machine can do, from a shell."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kimicore import __version__
from kimicore.cli import (
    bench,
    chat,
    check_policy,
    doctor,
    generate,
    policies,
    precision,
    prune,
    quantize,
    simulate,
    verify,
    warmup,
)
from kimicore.errors import ConfigError, InvalidRequest, KimiCoreError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    0; 1 for an error; 2 for bad usage; 130 when interrupted. A command that answers a question with its status
    (``verdict`` among its defaults) ends with 1 for no and with 2 for every error, so that none is taken for an answer.
    """
    parser = argparse.ArgumentParser(prog="kimicore", description="An LLM inference engine that runs in your process.")
    parser.add_argument("--version", action="version", version=f"kimicore {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    offered = (
        generate,
        chat,
        doctor,
        policies,
        check_policy,
        precision,
        prune,
        quantize,
        simulate,
        bench,
        warmup,
        verify,
    )
    for module in offered:
        module.add_parser(commands)
    options = parser.parse_args(arguments)
    failed = 2 if getattr(options, "verdict", False) else 1
    try:
        status: int = options.run(options)
        return status
    except KimiCoreError as error:
        print(f"kimicore: {type(error).__name__}: {error}", file=sys.stderr)
        return 2 if isinstance(error, (ConfigError, InvalidRequest)) else failed
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has left; so do we, silently
        return failed


if __name__ == "__main__":
    sys.exit(main())
