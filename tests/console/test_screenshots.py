"""The pictures of docs/console.md can be taken, and are those that the text shows."""

from __future__ import annotations

import re
from pathlib import Path

from playwright.sync_api import Browser

from tests.console.conftest import Served
from tests.console.screenshots import MOST_BYTES, take

DOCS = Path(__file__).parents[2] / "docs"


def test_the_pictures_are_taken_and_the_docs_show_each_of_them(
    served: Served, chromium: Browser, tmp_path: Path
) -> None:
    names = take(served, chromium, tmp_path)
    for name in names:
        assert (tmp_path / name).stat().st_size < MOST_BYTES
        assert (DOCS / "console" / name).stat().st_size < MOST_BYTES
    shown = re.findall(r"\(console/([\w-]+\.png)\)", (DOCS / "console.md").read_text())
    assert sorted(shown) == sorted(names) == sorted(path.name for path in (DOCS / "console").iterdir())
