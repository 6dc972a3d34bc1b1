"""The states of a page, and of the slot of a window part: every one of both is in one of them."""

from __future__ import annotations

import enum
from typing import Protocol

from twostroke.ids import BlockHash, SessionId


class PageState(enum.Enum):
    FREE = "free"
    CACHED = "cached"
    PINNED = "pinned"
    ARRIVING = "arriving"
    ACTIVE = "active"
    QUARANTINED = "quarantined"


UNHELD_BLOCKS = frozenset({PageState.CACHED, PageState.PINNED})
"""States of blocks that are readable and that nobody holds."""


class PageRecord(Protocol):
    """What a pool knows of a page, or of the slot of a window part."""

    state: PageState
    hash: BlockHash | None
    filled: bool
    refs: int
    """Number of holders."""
    writer: SessionId | None


def check_record(name: str, record: PageRecord) -> None:
    """Assert that holders, hash, bytes and writer are those of its state."""
    is_hashed, is_written = record.hash is not None, record.writer is not None
    match record.state:
        case PageState.FREE:
            consistent = not (record.refs or is_hashed or record.filled or is_written)
        case PageState.CACHED | PageState.PINNED:
            consistent = not record.refs and is_hashed and record.filled and not is_written
        case PageState.ARRIVING:
            consistent = record.refs > 0 and is_hashed and not record.filled
        case PageState.ACTIVE:
            consistent = record.refs > 0 and not is_written and is_hashed == record.filled
        case PageState.QUARANTINED:
            consistent = not record.refs and not is_hashed and is_written
    assert consistent, f"{name} is inconsistent: {record}"
