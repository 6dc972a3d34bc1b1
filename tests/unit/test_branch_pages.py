"""Each branch has a page that says where it is, what proves it and what it does not do; what pages name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAP = ROOT / "docs/architecture.md"
PAGES = sorted((ROOT / "docs/branches").glob("*.md"))
TRUNK_PAGES = [MAP, *(ROOT / "docs" / name for name in ("backends.md", "page-groups.md"))]
HEADINGS = ["How it works", "What it promises", "What it does not do"]
HEADINGS_OF = {"windows-and-latents": ["Window parts", "Latents", *HEADINGS[1:]]}
LONGEST_SENTENCE = 25
"""Words, as the house's language has it."""
_TREE = re.compile(r"`((?:twostroke|router|cluster|decode_worker|prefill_worker|tools|tests)/[\w./]+)`")
_END = re.compile(r"(?<=[.?!:;])\s+|\(")


def paths_in(text: str) -> set[str]:
    """Returns the files and folders of the tree that a page names."""
    return set(_TREE.findall(text))


def long_sentences(text: str) -> list[str]:
    """Returns the sentences, and the cells of tables, that have too many words. A name in backticks is one word."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "X", text))
    parts = re.split(r"\n\s*\n|\n(?=[-*] |\d+\. |#)|(?<!\\)\|", text)
    return [each.strip() for part in parts for each in _END.split(part) if len(each.split()) > LONGEST_SENTENCE]


def test_the_map_links_to_every_page() -> None:
    assert set(re.findall(r"\(branches/([\w-]+)\.md\)", MAP.read_text())) == {page.stem for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_says_where_the_branch_is_what_it_promises_and_what_it_does_not_do(page: Path) -> None:
    text = page.read_text()
    headings = re.findall(r"^## (.*)$", text, flags=re.MULTILINE)
    wanted = HEADINGS_OF.get(page.stem, HEADINGS)
    assert [heading for heading in headings if heading in wanted] == wanted
    rows = re.findall(r"^\| ([A-Z]\w*)", text, flags=re.MULTILINE)
    assert {"Wired", "Promise"} <= set(rows)
    assert {"Port", "Ports"} & set(rows)
    assert {"Folders", "Files"} & set(rows)


@pytest.mark.parametrize("page", [*TRUNK_PAGES, *PAGES], ids=lambda page: page.stem)
def test_the_files_and_folders_that_a_page_names_are_there(page: Path) -> None:
    assert [path for path in paths_in(page.read_text()) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", [*TRUNK_PAGES, *PAGES], ids=lambda page: page.stem)
def test_sentences_are_short(page: Path) -> None:
    assert long_sentences(page.read_text()) == []


def test_what_is_not_there_and_what_is_too_long_is_noticed() -> None:
    assert paths_in("see `router/fleet` and `router/nowhere.py`") == {"router/fleet", "router/nowhere.py"}
    assert long_sentences(f"| {'word ' * 25}| {'word ' * 26}|\n") == [("word " * 26).strip()]
