"""``kimicore policies``: which policies there are, and where each comes from."""

from __future__ import annotations

import argparse

from kimicore.plugins import KINDS, known

__all__ = ["add_parser", "run"]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("policies", help="which policies there are, and where each comes from")
    parser.add_argument("kind", nargs="?", choices=sorted(KINDS), help="only those of this kind")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    rows = [
        (kind, name, origin)
        for kind in sorted(KINDS)
        if options.kind in (None, kind)
        for name, origin in sorted(known(kind).items())
    ]
    width = max([len(name) for _, name, _ in rows], default=0)
    for kind, name, origin in rows:
        print(f"{kind:<10} {name:<{width}}  {origin}")
    return 0
