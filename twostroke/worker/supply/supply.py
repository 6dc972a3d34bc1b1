"""The supply of one admitted sequence: the port of its suppliers, their order, and how their pulls ended."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from twostroke.kv_cache.parts import Part
from twostroke.kv_cache.pool import BlockPool
from twostroke.rpc.peer import PeerPrefix
from twostroke.rpc.v1 import worker_pb2
from twostroke.scheduler.sequence import Sequence as KnownSequence
from twostroke.worker.measured.link_rates import Link
from twostroke.worker.supply.pull_spec import PullReport


@dataclass(frozen=True, slots=True)
class ExpectedPages:
    """The pages that another worker will send of a prompt's first blocks, and when, in seconds from now."""

    blocks: int
    cached_blocks: int
    """Number of leading blocks that it has or fetches, and does not compute."""
    fetch_s: float
    """Time until it has the cached blocks."""
    wait_s: float
    """Time until it begins to compute the other blocks."""
    compute_s: float
    """Time of computing the other blocks."""
    latency_s: float
    page_s: float
    """Time of carrying one page, as measured on the link from there."""

    @classmethod
    def of_source(
        cls, forecast: worker_pb2.SourceForecast, blocks: int, link: Link, page_bytes: int
    ) -> ExpectedPages | None:
        """Returns what a page source will send; None while nothing was measured on the link."""
        if not link.bytes_per_s:
            return None
        return cls(
            blocks, forecast.cached_blocks, forecast.fetch_s, forecast.wait_s, forecast.compute_s,
            link.latency_s, page_bytes / link.bytes_per_s,
        )  # fmt: skip

    @classmethod
    def of_peer(cls, peer: PeerPrefix, link: Link, page_bytes: int) -> ExpectedPages | None:
        """Returns what a peer will send from its cache; None while nothing was measured on the link."""
        if not link.bytes_per_s:
            return None
        page_s = page_bytes / link.bytes_per_s
        return cls(peer.blocks, peer.blocks, peer.load_s, 0.0, 0.0, link.latency_s, page_s)

    def arrival_s(self, blocks: Sequence[int]) -> float:
        """Returns when the last of these blocks, in ascending order, will be here; infinity if they are not
        expected."""
        last = blocks[-1]
        if last >= self.blocks:
            return math.inf
        carried_s = self.fetch_s + len(blocks) * self.page_s
        if last < self.cached_blocks:
            return self.latency_s + carried_s
        computed = (last + 1 - self.cached_blocks) / (self.blocks - self.cached_blocks)
        computed_s = self.wait_s + computed * self.compute_s + self.page_s
        return self.latency_s + max(carried_s, computed_s)

    def batches(self, blocks: Sequence[int]) -> list[list[int]]:
        """Divides blocks by how they come: those that the other worker has, and those that it will compute."""
        cached = self.cached_blocks
        batches = [[block for block in blocks if block < cached], [block for block in blocks if block >= cached]]
        return [batch for batch in batches if batch]


class Behind(Protocol):
    """The suppliers after one in the order, as that one sees them."""

    @property
    def is_expected(self) -> bool:
        """Whether it is known when the next one will bring its pages."""

    def arrival_s(self, blocks: Sequence[int]) -> float:
        """Returns in how many seconds the next one will have brought these blocks, in ascending order.

        Infinity where it does not bring them, or where that is not known.
        """

    def batches(self, blocks: Sequence[int]) -> list[list[int]]:
        """Divides blocks by how the next one has them: those that it holds, and those that it will compute."""

    def take_over(self, parts: Sequence[Part]) -> None:
        """Hands on parts that the supplier does not bring after all, unless others write them by now."""

    def pulling(self, pull: asyncio.Future[PullReport]) -> None:
        """Notes that a pull has begun, which the sequence waits for."""


class Supplier(Protocol):
    """Writes missing parts of one sequence, and may hold only some of them."""

    @property
    def depth(self) -> int:
        """Leading blocks of the sequence of which it may bring parts."""

    @property
    def expected(self) -> ExpectedPages | None:
        """Returns what it is expected to send; None where that is not known."""

    def begin(self, parts: Sequence[Part], behind: Behind) -> list[Part]:
        """Begins to bring parts that have no writer, as far as it brings them sooner than the suppliers after it.

        Returns the others. It is the writer of what it brings.
        """


class SupplyListener:
    """Receives events of a supply for the sequence's owner. A method does nothing unless an owner overrides it."""

    __slots__ = ()

    def left(self, parts: Sequence[Part]) -> None:
        """Takes note that no supplier of this worker brings these parts."""

    def pulled(self, report: PullReport) -> None:
        """Takes the report of a pull that has ended, also of an earlier admission."""

    def settled(self) -> None:
        """Takes note that no pull is under way any more."""


class Supply:
    """The suppliers of a sequence from one admission to its end or preemption, for the event loop only."""

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
        """Returns what the supplier at this place is expected to send; None if there is none, or no forecast."""
        return self._suppliers[place].expected if place < len(self._suppliers) else None

    def take_over(self, parts: Sequence[Part]) -> None:
        """Hands on parts that a supplier of this worker does not bring after all."""
        if not (self._is_over or self._sequence.ended):
            self._leave([part for part in parts if self._is_unwritten(part)])

    def pulling(self, place: int, pull: asyncio.Future[PullReport]) -> None:
        """Waits for a pull of the supplier at this place."""
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
    """The suppliers after the one of this place (see `Behind`)."""

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
