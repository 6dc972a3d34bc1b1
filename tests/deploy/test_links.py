"""Every link of a document to another one leads to a file that is there, and to a heading of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.deploy.tools import ROOT

DOCUMENTS = sorted(
    str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/**/*.md"))
)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
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


def broken_links(page: Path) -> list[str]:
    text = _CODE.sub("", page.read_text())
    return [link for link in _LINK.findall(text) if "://" not in link and not _leads_somewhere(page, link)]


def _leads_somewhere(page: Path, link: str) -> bool:
    path, _, heading = link.partition("#")
    target = page.parent / path if path else page
    return target.exists() and (not heading or heading in _headings(target))


def _headings(page: Path) -> set[str]:
    """The names that GitHub gives to headings."""
    titles = re.findall(r"^#+ (.*)$", _CODE.sub("", page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
