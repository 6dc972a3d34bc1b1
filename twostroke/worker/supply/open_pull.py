"""A pull that is under way, and its missing parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from twostroke.base.ids import PageId
from twostroke.kv_cache.parts import GroupKind, Part
from twostroke.kv_cache.pool import BlockPool
from twostroke.worker.supply.pull_spec import PullSpec


class OpenPull:
    """One pull under way. The pull client owns it and alone changes it. Only `is_abandoned` takes O(blocks)."""

    def __init__(self, spec: PullSpec, pool: BlockPool, started_s: float) -> None:
        self.spec = spec
        self.started_s = started_s
        """Start, on the event loop's clock."""
        self.remaining: dict[Part, PageId] = dict(spec.parts)
        """Parts that have not come, and their pages here."""
        self.has_begun = False
        """Whether the source has announced pages."""
        self.is_stopped = False
        """Whether the pull has been stopped and is about to end."""
        self._pool = pool
        self._parts_left: dict[int, int] = Counter([part.block for part in spec.parts])
        """Number of parts that have not come, by block; complete blocks are left out."""
        self._blocks = sorted(self._parts_left)
        self._first = 0
        """Index in `_blocks`: nothing is missing of the blocks before it."""

    @property
    def source(self) -> str:
        return self.spec.source.worker_id

    @property
    def missing_blocks(self) -> int:
        """Blocks of which something has not come."""
        return len(self._parts_left)

    @property
    def first_missing(self) -> int:
        """The first block of which something has not come. There is one as long as the pull is not over."""
        while self._blocks[self._first] not in self._parts_left:
            self._first += 1
        return self._blocks[self._first]

    @property
    def is_computable(self) -> bool:
        """Whether all blocks before the first missing one are here, and no other sequence waits for missing pages."""
        first, spec, pool = self.first_missing, self.spec, self._pool
        is_reached = not first or pool.find(spec.block_hashes[first - 1]) is not None
        return is_reached and not pool.writes_shared(spec.session)

    @property
    def is_abandoned(self) -> bool:
        """Whether pages are missing and nobody holds any of them. The first one is checked first, and mostly decides.

        A pull without missing pages is not abandoned: it ends by itself, and then reports what it brought.
        """
        if not self.remaining:
            return False
        pool, first = self._pool, self.remaining.get(Part(self.first_missing, GroupKind.FULL))
        if first is not None and pool.is_wanted(first):
            return False
        return not any(pool.is_wanted(page) for page in self.remaining.values())

    def came(self, parts: Sequence[Part]) -> list[PageId]:
        """Notes that parts have come; returns their pages."""
        left = self._parts_left
        for block, _ in parts:
            others = left.pop(block) - 1
            if others:
                left[block] = others
        return list(map(self.remaining.pop, parts))
