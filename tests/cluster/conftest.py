"""What all tests of clusters share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.forked import preloading
from twostroke.config import DEFAULT_MODEL
from twostroke.models.catalog.fetch import fetch

SHORT_LAYERS = 6
"""Layers of 30: a token costs a third. For tests that compare a model with itself, whatever it says."""


@pytest.fixture(scope="module", autouse=True)
def preloaded() -> Iterator[None]:
    """A start takes a second less for each process, and two less with torch."""
    with preloading():
        yield


@pytest.fixture(scope="session")
def short_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first layers of the default model in bfloat16."""
    from tests.draft_models import save_first_layers  # loads torch, which tests of paced workers do without

    directory = fetch(DEFAULT_MODEL, "bfloat16", lambda stage, part: None)
    return save_first_layers(directory, tmp_path_factory.mktemp("models") / "short", SHORT_LAYERS)
