"""Both policies keep the promises of their kind."""

import pytest
from kimicore_example_policies.batching import TenantTurns
from kimicore_example_policies.eviction import DeepestFirst

from kimicore.testing import check_batching, check_eviction


@pytest.mark.parametrize("check", [*check_batching(TenantTurns), *check_eviction(DeepestFirst)], ids=str)
def test_a_promise_is_kept(check):
    """The kit finds no history in which the promise is broken."""
    check()
