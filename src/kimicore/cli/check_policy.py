"""``kimicore check-policy``: does a policy keep the promises of its kind?"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from kimicore.cli.options import policy_settings
from kimicore.errors import ConfigError, PluginError
from kimicore.plugins import KINDS, known, resolve

__all__ = ["add_parser", "run"]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("check-policy", help="check that a policy keeps the promises of its kind")
    parser.add_argument(
        "policy",
        nargs="+",
        metavar="[KIND] NAME",
        help="a policy's name, after its kind where several kinds have that name; or module:Class",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of the policy; may be given repeatedly",
    )
    parser.add_argument("--check", action="append", default=[], metavar="CHECK", help="only the check of this name")
    parser.add_argument("--examples", type=int, default=60, help="histories that each check tries (default 60)")
    parser.add_argument("--steps", type=int, default=30, help="events in one history (default 30)")
    parser.add_argument("--seed", type=int, default=0, help="chooses the histories (default 0)")
    parser.set_defaults(run=run, verdict=True)


def run(options: argparse.Namespace) -> int:
    """Run the command: 0 where every promise is kept, 1 where one is broken."""
    from kimicore.testing import BrokenPromise, check_policy  # other commands need none of it

    for name in ("examples", "steps"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name} {getattr(options, name)}: must be at least 1")
    kind, policy = _found(options.policy, policy_settings(options.set))
    checks = check_policy(kind, lambda: policy, examples=options.examples, steps=options.steps, seed=options.seed)
    names = [check.name for check in checks]
    for name in options.check:
        if name not in names:
            raise ConfigError(f"--check {name}: the checks of {kind} policies are {', '.join(names)}")
    chosen = [check for check in checks if not options.check or check.name in options.check]
    print(f"{kind} policy {policy.name}: {policy}")
    broken = 0
    for check in chosen:
        try:
            check()
        except BrokenPromise as error:
            broken += 1
            print(f"BROKEN  {check.name:<13} {check.promise}")
            print("\n".join(str(error).splitlines()[1:]), flush=True)
        else:
            print(f"ok      {check.name:<13} {check.promise}", flush=True)
    print(f"{len(chosen) - broken} of {len(chosen)} promises kept")
    return 1 if broken else 0


def _found(words: Sequence[str], settings: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the kind and the settings object that the words name."""
    if len(words) > 2:
        raise ConfigError(f"{' '.join(words)}: name one policy, as NAME, KIND NAME or module:Class")
    kind, name = (None, words[0]) if len(words) == 1 else (words[0], words[1])
    if kind is not None and kind not in KINDS:
        raise ConfigError(f"{kind}: there is no such kind of policy; kinds are {', '.join(sorted(KINDS))}")
    if ":" in name:
        return _imported(kind, name, settings)
    if kind is None:
        kinds = [one for one in sorted(KINDS) if name in known(one)]
        if len(kinds) > 1:
            raise ConfigError(
                f"{name} is a policy of several kinds: write {' or '.join(f'{one} {name}' for one in kinds)}"
            )
        if not kinds and name in KINDS:
            raise ConfigError(
                f"{name}: a policy's name is missing after the kind; they are {', '.join(sorted(known(name)))}"
            )
        if not kinds:
            raise PluginError(f"there is no policy {name!r} of any kind; `kimicore policies` lists them")
        kind = kinds[0]
    return kind, resolve(kind, name, settings)


def _imported(kind: str | None, target: str, settings: Mapping[str, Any]) -> tuple[str, Any]:
    from kimicore.testing import kind_of

    module, _, attribute = target.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # a module in the folder where the command was given, as for `python -m`
    try:
        made: Any = import_module(module)
        for part in attribute.split("."):
            made = getattr(made, part)
        policy = made(**settings)
    except ConfigError:
        raise
    except Exception as error:
        raise PluginError(f"{target} cannot be used: {error!r}") from error
    found = kind or kind_of(policy)
    if found is None:
        raise ConfigError(f"{target}: its kind cannot be told from its methods; write KIND {target}")
    return found, policy
