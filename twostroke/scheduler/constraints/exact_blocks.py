"""Exact blocks: a token sees its own block exact and earlier ones as their pages hold them, which is rounded.

Beside the page of an unfinished block, steps keep its exact values. The next step gets the pages that no longer need
them (`Batch.released`). The following steps get them again, until one of these steps has succeeded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from twostroke.base.ids import PageId
from twostroke.kv_cache.pool import BlockPool
from twostroke.scheduler.batching import Step
from twostroke.scheduler.branches import SharedConstraint
from twostroke.scheduler.sequence import Demand, Sequence


class ExactBlocks(SharedConstraint):
    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self.finished = dict.fromkeys(map(PageId, range(pool.total)))
        """Pages with exact values that can be freed. No step that got them has succeeded yet. In the beginning these
        are all pages: calibration has run steps in them."""

    def demand(self, sequence: Sequence, demand: Demand) -> Demand:
        """Returns the demand. A computed sequence runs its last block again: no exact values of it are left."""
        if demand.start >= sequence.computed:
            return demand
        start = demand.start // self._block_size * self._block_size
        tokens = len(sequence.known) - start
        return demand._replace(start=start, most=tokens, least=tokens)

    def most_ahead(self, sequence: Sequence, most: int) -> int:
        """Returns how many proposed tokens may run. The last token of a block stores the block, so it must be known."""
        return min(most, self._block_size - len(sequence.known) % self._block_size - 1)

    def ran(self, sequence: Sequence, start: int, end: int) -> None:
        first, last = start // self._block_size, end // self._block_size
        if last > first:
            self.finished.update(dict.fromkeys(sequence.pages[first:last]))

    def passed(self, sequence: Sequence, before: int) -> None:
        """Frees exact values: another sequence has completed the block that this one had begun."""
        if before % self._block_size:
            self.finished[sequence.pages[before // self._block_size]] = None

    def releases(self, sequence: Sequence) -> None:
        self.finished.update(dict.fromkeys(self._begun(sequence)))

    def added_to(self, step: Step) -> Step:
        if not self.finished:
            return step
        return replace(step, batch=replace(step.batch, released=tuple(self.finished)))

    def applied(self, step: Step) -> None:
        for page in step.batch.released:
            self.finished.pop(PageId(page), None)

    def _begun(self, sequence: Sequence) -> Iterator[PageId]:
        """Yields the pages with exact values that the sequence may have left and no other is computing."""
        nobody, hashes = {None, sequence.session}, sequence.block_hashes
        first = sequence.first_query // self._block_size
        for block, page in enumerate(sequence.pages[first:], first):
            writers = {self._pool.writer(page)}
            if block < len(hashes):
                writers.update(group.writer_of(hashes[block]) for group in self._pool.others)
            if writers <= nobody:
                yield page
