"""What all tests of clusters share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.forked import preloading


@pytest.fixture(scope="module", autouse=True)
def preloaded() -> Iterator[None]:
    """A start takes a second less for each process, and two less with torch."""
    with preloading():
        yield
