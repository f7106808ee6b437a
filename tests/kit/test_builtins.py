"""Every built-in policy keeps the promises of its kind."""

from __future__ import annotations

import os

import pytest

from kimicore.plugins import KINDS, resolve
from kimicore.testing import Check, check_policy

EXAMPLES = 600 if os.environ.get("KIMICORE_HYPOTHESIS") == "deep" else 20


def checks() -> list[Check]:
    """All checks of all built-in policies."""
    found = []
    for kind, names in KINDS.items():
        for name in names:
            policy = resolve(kind, name)
            found += check_policy(kind, lambda policy=policy: policy, examples=EXAMPLES)
    return found


@pytest.mark.parametrize("check", checks(), ids=lambda check: f"{check.kind}-{check}")
def test_built_in_policies_keep_their_promises(check: Check):
    """The kit finds no history in which a built-in policy breaks the promise."""
    check()
