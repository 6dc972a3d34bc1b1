"""What the gate's part of these programs shares."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.forked import preloading


@pytest.fixture(scope="module", autouse=True)
def preloaded() -> Iterator[None]:
    """Processes that are killed and started again many times load their modules once."""
    with preloading():
        yield
