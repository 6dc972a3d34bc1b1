"""The supply of one admitted sequence: its suppliers in their order, and what came of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from twostroke.kv_cache.parts import Part
from twostroke.kv_cache.pool import BlockPool
from twostroke.scheduler.sequence import Sequence as KnownSequence
from twostroke.worker.supply.expected import ExpectedPages
from twostroke.worker.supply.pull_spec import PullReport
from twostroke.worker.supply.supplier import Supplier


class SupplyListener:
    """What the owner of a sequence is told of its supply. Each method does nothing unless an owner needs it."""

    __slots__ = ()

    def left(self, parts: Sequence[Part]) -> None:
        """Takes note that no supplier of this worker brings these parts."""

    def pulled(self, report: PullReport) -> None:
        """Takes the report of a pull that has ended, of an earlier admission too."""

    def settled(self) -> None:
        """Takes note that no pull is under way any more."""


class Supply:
    """The suppliers of a sequence from one admission to its end or preemption; they live on the event loop."""

    def __init__(
        self,
        sequence: KnownSequence,
        pool: BlockPool,
        here: Sequence[Supplier],
        elsewhere: Sequence[Supplier],
        listener: SupplyListener,
        pull_to: Callable[[KnownSequence, int], list[Part]],
    ) -> None:
        """`here` are the suppliers of this worker, `elsewhere` other workers.

        `pull_to` is the scheduler's: it prepares the sequence for another pull and returns the parts without a writer.
        """
        self._sequence = sequence
        self._pool = pool
        self._suppliers = (*here, *elsewhere)
        self._here = len(here)
        self._listener = listener
        self._pull_to = pull_to
        self._pulls: set[asyncio.Future[PullReport]] = set()
        self._is_over = False

    @property
    def is_pulling(self) -> bool:
        return bool(self._pulls)

    def begin(self, missing: Sequence[Part]) -> None:
        """Finds suppliers for the missing parts; called before any of them is computed."""
        left = self._offer(missing, 0, self._here)
        self._leave(left)

    def end(self) -> None:
        """Notes that the sequence was preempted or has ended: nothing is handed on any more."""
        self._is_over = True

    def expected(self, place: int) -> ExpectedPages | None:
        """Returns what the supplier of this place is expected to send; None where there is none, or no forecast."""
        return self._suppliers[place].expected if place < len(self._suppliers) else None

    def take_over(self, parts: Sequence[Part]) -> None:
        """Hands on parts that a supplier of this worker does not bring after all."""
        if not (self._is_over or self._sequence.ended):
            self._leave([part for part in parts if self._is_unwritten(part)])

    def pulling(self, place: int, pull: asyncio.Future[PullReport]) -> None:
        """Waits for a pull of the supplier of this place."""
        self._pulls.add(pull)
        pull.add_done_callback(lambda ended: self._ended(place, ended))

    def _leave(self, parts: Sequence[Part]) -> None:
        """Lets other workers bring what no supplier of this worker brings."""
        self._listener.left(parts)
        self._offer(parts, self._here, len(self._suppliers))

    def _offer(self, parts: Sequence[Part], first: int, end: int) -> Sequence[Part]:
        """Asks the suppliers from `first` to before `end`, one after the other; returns what none of them takes."""
        for place in range(first, end):
            parts = self._suppliers[place].begin(parts, _Behind(self, place))
        return parts

    def _ended(self, place: int, pull: asyncio.Future[PullReport]) -> None:
        report = None if pull.cancelled() else pull.result()
        if report is not None:
            self._listener.pulled(report)
        self._pulls.remove(pull)
        if self._is_over:
            return
        following = place + 1
        if report is not None and report.failure is not None and following < len(self._suppliers):
            missing = self._pull_to(self._sequence, self._suppliers[following].depth)
            self._offer(missing, following, len(self._suppliers))
        if not self._pulls:
            self._listener.settled()

    def _is_unwritten(self, part: Part) -> bool:
        page = self._sequence.page_of(part)
        return page is not None and self._pool.groups[part.group].is_unwritten(page)


@dataclass(frozen=True, slots=True)
class _Behind:
    """What is behind the supplier of one place (see `Behind`)."""

    supply: Supply
    place: int

    @property
    def is_expected(self) -> bool:
        return self.supply.expected(self.place + 1) is not None

    def arrival_s(self, blocks: Sequence[int]) -> float:
        expected = self.supply.expected(self.place + 1)
        return float("inf") if expected is None else expected.arrival_s(blocks)

    def batches(self, blocks: Sequence[int]) -> list[list[int]]:
        expected = self.supply.expected(self.place + 1)
        return [list(blocks)] if expected is None else expected.batches(blocks)

    def take_over(self, parts: Sequence[Part]) -> None:
        self.supply.take_over(parts)

    def pulling(self, pull: asyncio.Future[PullReport]) -> None:
        self.supply.pulling(self.place, pull)
