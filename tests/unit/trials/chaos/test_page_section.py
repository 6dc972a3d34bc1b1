"""The part of a page that a command writes: nothing around it changes, and a page without it is refused at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trials.chaos import page_section
from twostroke.base.errors import ConfigError

PAGE = "above\n<!-- faults:soak -->\nold\n<!-- end of faults:soak -->\nbelow\n"


def test_only_what_is_between_the_marks_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "faults.md"
    page.write_text(PAGE)
    page_section.check(page, page_section.SOAK)
    for _ in range(2):
        page_section.put(page, page_section.SOAK, "new")
        assert page.read_text() == PAGE.replace("old", "new")


@pytest.mark.parametrize("text", [None, "", PAGE, "<!-- end of faults:matrix --><!-- faults:matrix -->"])
def test_a_page_without_the_marks_is_refused_before_anything_is_measured(tmp_path: Path, text: str | None) -> None:
    page = tmp_path / "faults.md"
    if text is not None:
        page.write_text(text)
    with pytest.raises(ConfigError, match=r"--write .*faults\.md: .*<!-- faults:matrix --> "):
        page_section.check(page, page_section.MATRIX)
