"""Links of documents lead to files that are there, and to headings of them; rows of a table fit its heading."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.deploy.tools import ROOT

DOCUMENTS = sorted(
    str(path.relative_to(ROOT))
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/**/*.md"))
)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
_BORDER = re.compile(r"(?<!\\)\|")
"""The end of a cell. GitHub cuts rows at bars in code, too, if they have no backslash."""
_CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_to_files_and_headings(name: str) -> None:
    assert not broken_links(ROOT / name)


def test_a_link_to_nothing_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One\n\n## It is: two\n\n[a](page.md#it-is-two) [b](page.md#three) [c](none.md) [d](https://x.y)\n"
    )
    assert broken_links(page) == ["page.md#three", "none.md"]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_rows_of_tables_have_as_many_cells_as_their_headings(name: str) -> None:
    assert not broken_tables((ROOT / name).read_text())


def test_a_row_that_is_cut_and_one_without_a_heading_are_noticed() -> None:
    table = "| a | b |\n|---|---|\n"
    assert not broken_tables(f"{table}| `x\\|y` | z |\n")
    assert broken_tables(f"{table}| `x|y` | z |\n") == ["| `x|y` | z |"]
    assert broken_tables(f"{table}\n| x | y |\n") == ["| x | y |"]


def broken_links(page: Path) -> list[str]:
    text = _CODE.sub("", page.read_text())
    return [link for link in _LINK.findall(text) if "://" not in link and not _leads_somewhere(page, link)]


def broken_tables(text: str) -> list[str]:
    """Returns rows with more or fewer cells than the heading, and first rows of tables that have no heading."""
    broken = []
    for table in _TABLE.findall(_CODE.sub("", text)):
        heading, *rows = table.splitlines()
        if not rows or rows[0].strip("|-: "):
            broken.append(heading)
        broken += [row for row in rows if len(_BORDER.findall(row)) != len(_BORDER.findall(heading))]
    return broken


def _leads_somewhere(page: Path, link: str) -> bool:
    path, _, heading = link.partition("#")
    target = page.parent / path if path else page
    return target.exists() and (not heading or heading in _headings(target))


def _headings(page: Path) -> set[str]:
    """The names that GitHub gives to headings."""
    titles = re.findall(r"^#+ (.*)$", _CODE.sub("", page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
