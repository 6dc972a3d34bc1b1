"""The events of a block pool: blocks that became readable or were removed, and pages that got a new writer."""

from __future__ import annotations

from typing import Protocol

from twostroke.base.ids import BlockHash, PageId


class PoolListener(Protocol):
    """Called on every change in the set of readable blocks, and on every new writer of a page."""

    def stored(self, block_hash: BlockHash) -> None: ...

    def removed(self, block_hash: BlockHash) -> None: ...

    def evicting(self, page: PageId, block_hash: BlockHash, parent: BlockHash) -> None:
        """Called just before a cached block loses its page to another one: its bytes can still be copied."""

    def forgotten(self, block_hash: BlockHash) -> None:
        """Called with a removed block that is not to be used again, wherever it lies."""

    def new_writer(self, page: PageId) -> None: ...
