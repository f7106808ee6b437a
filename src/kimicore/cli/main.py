"""``kimicore``: generate, chat and look at what this machine can do, from a shell."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kimicore import __version__
from kimicore.cli import bench, chat, check_policy, doctor, generate, policies, precision, simulate, warmup
from kimicore.errors import ConfigError, InvalidRequest, KimiCoreError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0, 1 for an error, 2 for bad usage, 130 when interrupted."""
    parser = argparse.ArgumentParser(prog="kimicore", description="An LLM inference engine that runs in your process.")
    parser.add_argument("--version", action="version", version=f"kimicore {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (generate, chat, doctor, policies, check_policy, precision, simulate, bench, warmup):
        module.add_parser(commands)
    options = parser.parse_args(arguments)
    try:
        status: int = options.run(options)
        return status
    except KimiCoreError as error:
        print(f"kimicore: {type(error).__name__}: {error}", file=sys.stderr)
        return 2 if isinstance(error, (ConfigError, InvalidRequest)) else 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has left; so do we, silently
        return 1


if __name__ == "__main__":
    sys.exit(main())
