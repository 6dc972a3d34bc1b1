"""Pages that are announced together: what their columns say, and what does not fit together."""

from __future__ import annotations

import pytest

from twostroke.base.errors import TransferFailed
from twostroke.base.ids import PageId
from twostroke.kv_cache.parts import GroupKind, Part
from twostroke.rpc.v1 import worker_pb2
from twostroke.worker.pulls.announced import AnnouncedPages, announced_pages, announcement

FULL, FURTHER = GroupKind.FULL, GroupKind.FURTHER


def digest_of(page: int) -> bytes:
    return bytes([page]) * 8


def said(pages: dict[Part, int]) -> worker_pb2.PagesReady:
    ready = {part: PageId(page) for part, page in pages.items()}
    return announcement(ready, [(10 * page, digest_of(page)) for page in pages.values()])


def columns(announced: AnnouncedPages) -> list[tuple[Part, int, int, bytes]]:
    return list(zip(announced.parts, announced.remote, announced.generations, announced.digests, strict=True))


def test_a_puller_reads_what_a_source_has_announced_group_by_group() -> None:
    pages = {Part(0, FULL): 4, Part(0, FURTHER): 90, Part(1, FULL): 7, Part(3, FURTHER): 91}
    full, further = announced_pages(said(pages), pages, "source")
    rows = {part: (part, page, 10 * page, digest_of(page)) for part, page in pages.items()}
    assert columns(full) == [rows[Part(0, FULL)], rows[Part(1, FULL)]]
    assert columns(further) == [rows[Part(0, FURTHER)], rows[Part(3, FURTHER)]]


def test_pages_that_have_come_already_are_left_out() -> None:
    pages = {Part(block, FULL): block for block in range(5)}
    (announced,) = announced_pages(said(pages), [Part(1, FULL), Part(4, FULL)], "source")
    assert list(announced.parts) == [Part(1, FULL), Part(4, FULL)]
    assert list(announced.remote) == [1, 4]
    assert announced_pages(said(pages), [], "source") == []


@pytest.mark.parametrize("column", ["blocks", "pages", "generations", "digests", "groups"])
def test_columns_of_different_lengths_are_refused(column: str) -> None:
    message = said({Part(0, FULL): 4, Part(0, FURTHER): 9, Part(1, FULL): 7})
    whole = getattr(message, column)
    if column == "digests":
        message.digests = whole[:-1]
    else:
        del whole[-1]
    with pytest.raises(TransferFailed, match="different lengths"):
        announced_pages(message, [Part(0, FULL)], "source")


def test_a_page_that_is_named_twice_is_refused() -> None:
    message = said({Part(0, FULL): 4, Part(1, FULL): 7})
    message.blocks[1] = 0
    with pytest.raises(TransferFailed, match="source announced a page twice"):
        announced_pages(message, [Part(0, FULL), Part(1, FULL)], "source")
