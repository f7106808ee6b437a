"""What all tests share: the demo models (fetched once, checked), and how hard the property tests try."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# On a machine that does other work as well, OpenMP's threads would spin for milliseconds in every small product.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

settings.register_profile(
    "quick", deadline=None, max_examples=40, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "deep", deadline=None, max_examples=1000, stateful_step_count=120, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("KIMICORE_HYPOTHESIS", "quick"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the long forms to the run that asks for them with ``-m long``."""
    if "long" in (config.option.markexpr or ""):
        return
    skip = pytest.mark.skip(reason="long form: run `nox -s machines`, or pytest -m long")
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct."""
    from kimicore.model.fetch import fetch

    return fetch("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def gemma_path() -> Path:
    """The GGUF file of Gemma 3 270M."""
    from kimicore.model.fetch import fetch

    return fetch("gemma-3-270m")
