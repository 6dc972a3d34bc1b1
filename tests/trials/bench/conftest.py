"""Options as the command line makes them."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import pytest

from tests.trials.bench.__main__ import PROGRAM


@pytest.fixture
def arguments() -> Callable[..., argparse.Namespace]:
    return lambda *words: PROGRAM.parser(words).parse_args(words)
