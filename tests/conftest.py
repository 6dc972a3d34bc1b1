"""Fixtures that more than one package's tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from twostroke.config import DEFAULT_MODEL
from twostroke.models.fetch import fetch

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # before the first channel: tests that kill servers are noisy else


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The default model in float32, fetched into the user's cache if it is not there yet."""
    return fetch(DEFAULT_MODEL, "float32", lambda stage, part: None)
