"""Conformance kits for policies, and what tests of applications and plugins share.

.. code-block:: python

    @pytest.mark.parametrize("check", check_eviction(MyPolicy), ids=str)
    def test_my_policy_keeps_its_promises(check):
        check()

A kit (:func:`check_batching`, :func:`check_eviction`, :func:`check_padding`, :func:`check_precision`) takes what makes
a policy's settings and returns one named check for each promise. It needs the package ``hypothesis``
(``pip install 'kimicore[testing]'``) and no test framework. :class:`FakeEngine` runs the engine's own decisions without
a model; :mod:`kimicore.testing.faults` makes policies fail on purpose.
"""

from __future__ import annotations

from kimicore.testing.batching import check_batching
from kimicore.testing.clock import ManualClock
from kimicore.testing.engine import FakeEngine, FakeRequest
from kimicore.testing.eviction import check_eviction
from kimicore.testing.kits import check_policy, kind_of
from kimicore.testing.padding import check_padding
from kimicore.testing.precision import check_precision
from kimicore.testing.promises import BrokenPromise, Check
from kimicore.testing.runner import FakeRunner, fake_tokens

__all__ = [
    "BrokenPromise",
    "Check",
    "FakeEngine",
    "FakeRequest",
    "FakeRunner",
    "ManualClock",
    "check_batching",
    "check_eviction",
    "check_padding",
    "check_policy",
    "check_precision",
    "fake_tokens",
    "kind_of",
]
