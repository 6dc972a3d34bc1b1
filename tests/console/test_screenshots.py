"""The pictures of docs/console.md can be taken, and are those that the text shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.console.conftest import Served
from tests.console.screenshots import MOST_BYTES, SHOTS, name_of, take

DOCS = Path(__file__).parents[2] / "docs"


def test_the_docs_show_each_picture() -> None:
    names = [name_of(*shot) for shot in SHOTS]
    for name in names:
        assert (DOCS / "console" / name).stat().st_size < MOST_BYTES
    shown = re.findall(r"\(console/([\w-]+\.png)\)", (DOCS / "console.md").read_text())
    assert sorted(shown) == sorted(names) == sorted(path.name for path in (DOCS / "console").iterdir())


@pytest.mark.slow
def test_the_pictures_can_be_taken(served: Served, chromium: Browser, tmp_path: Path) -> None:
    """The gate opens each of these views for axe-core: `test_operating.py`."""
    for name in take(served, chromium, tmp_path):
        assert (tmp_path / name).stat().st_size < MOST_BYTES
