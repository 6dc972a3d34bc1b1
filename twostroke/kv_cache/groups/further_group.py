"""The port of a group beside the first one: it keeps the pages of some blocks of a chain, not of all.

A holder of its page of a block holds the block's page in the first group, too. Where the first group removes the page
of a block, the others have removed theirs before.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence

from twostroke.base.ids import BlockHash, PageId
from twostroke.kv_cache.groups.group_pool import GroupPool
from twostroke.kv_cache.groups.page_state import PageRecord


class FurtherGroup(GroupPool):
    """What a pool asks of a group beside the first one."""

    @abc.abstractmethod
    def depth(self, hashes: Sequence[BlockHash], most: int) -> int:
        """Returns after how many of these blocks a sequence can continue. The first group has the pages of `most` of
        them. O(blocks).
        """

    @abc.abstractmethod
    def share_last(self, hashes: Sequence[BlockHash]) -> dict[int, PageId]:
        """Holds what a sequence needs to continue after this chain, as far as there is room.

        The caller holds the pages of the chain. What is not here is arriving. `unshare` releases it.
        """

    @abc.abstractmethod
    def has_room_to_pin(self, hashes: Sequence[BlockHash]) -> bool:
        """Returns whether a prefix can be pinned such that the longest sequence still fits."""

    @abc.abstractmethod
    def page_removed(self, block_hash: BlockHash, *, is_evicted: bool) -> None:
        """Removes the page of a block before the first group evicts or forgets its own. Neither has holders."""

    @abc.abstractmethod
    def forget_cached(self) -> None:
        """Removes the cached pages. Those of the first group stay."""


MakeGroup = Callable[[list[PageRecord], Callable[[BlockHash], BlockHash | None]], FurtherGroup]
"""Makes a group over the records of all groups.

Its second argument returns the parent of a block with a readable page in the first group, else None."""
