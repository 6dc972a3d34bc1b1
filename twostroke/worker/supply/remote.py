"""Other workers as suppliers: a page source computes what it lacks, a peer sends what it holds.

A peer pull is given up when computing would have been done, so waiting for it costs at most that much again (ski
rental: Karlin et al., "Competitive snoopy caching", Algorithmica 1988).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from twostroke.base.ids import SessionId, WorkerId
from twostroke.config import WorkerConfig
from twostroke.kv_cache.parts import Part
from twostroke.kv_cache.pool import BlockPool
from twostroke.request import WeightsRef
from twostroke.rpc.peer import ANSWER_S, PeerPrefix
from twostroke.rpc.v1 import worker_pb2
from twostroke.scheduler.scheduler import Scheduler
from twostroke.scheduler.sequence import Constraint
from twostroke.scheduler.sequence import Sequence as KnownSequence
from twostroke.tracing.span import OpenSpan
from twostroke.worker.measured.link_rates import LinkRates
from twostroke.worker.supply.pull_spec import PullReport, PullSpec
from twostroke.worker.supply.supply import Behind, ExpectedPages, Supplier, Supply, SupplyListener


class PullStarter(Protocol):
    """The pull client (`twostroke.worker.pulls.pull_client`), as suppliers see it."""

    @property
    def links(self) -> LinkRates:
        """What was measured on the links from other workers."""

    def start(self, spec: PullSpec, tasks: asyncio.TaskGroup) -> asyncio.Future[PullReport]: ...


class Drain(Protocol):
    @property
    def queued_s(self) -> float:
        """Predicted seconds until every prompt token that waits here is computed."""


class PageSizes(Protocol):
    @property
    def page_bytes(self) -> int: ...


class SequenceBranches(Protocol):
    """What the branches of a worker contribute to a single sequence."""

    def suppliers_of(self, sequence: KnownSequence) -> Sequence[Supplier]:
        """Returns the suppliers on this worker, which are tried before other workers."""

    def constraints_of(self, weights: WeightsRef | None) -> tuple[Constraint, ...]:
        """Returns the constraints of a sequence with these weights, if any. Raises UnsupportedFeature."""


class SupplyHost(Protocol):
    """What suppliers use of the worker that they bring parts to."""

    @property
    def config(self) -> WorkerConfig: ...
    @property
    def facts(self) -> PageSizes: ...
    @property
    def pool(self) -> BlockPool: ...
    @property
    def scheduler(self) -> Scheduler: ...
    @property
    def loop(self) -> Drain: ...
    @property
    def pulls(self) -> PullStarter: ...
    def new_session(self) -> SessionId: ...
    @property
    def branches(self) -> SequenceBranches: ...


@dataclass(frozen=True, slots=True)
class Ordered:
    """The workers that a router named for a sequence, and what pulls from them have in common."""

    source: worker_pb2.PageSource | None = None
    """A worker that computes what it lacks."""
    peer: PeerPrefix | None = None
    """A worker that holds a prefix. The page source, or this worker without one, fetches from it what it lacks."""
    forecast: worker_pb2.SourceForecast | None = None
    """The router's prediction of when the page source has the blocks; it counts for the first admission only."""
    deadline_s: float | None = None
    """Deadline of the request in Unix seconds."""
    weights: WeightsRef | None = None
    """Weights besides the model's with which the source computes the blocks."""
    trace: OpenSpan | None = None
    """The parent span of pulls."""
    arrived: Callable[[int], None] | None = None
    """Called with each block of a peer as it becomes readable."""


class Supplies:
    """Makes the supply of each admitted sequence of one role; `tasks` end with the worker."""

    def __init__(self, host: SupplyHost, tasks: asyncio.TaskGroup) -> None:
        self._host = host
        self._tasks = tasks

    def of(self, sequence: KnownSequence, ordered: Ordered, listener: SupplyListener) -> Supply:
        """Returns a supply that has not begun."""
        host = self._host
        here, elsewhere = host.branches.suppliers_of(sequence), self._elsewhere(sequence, ordered)
        return Supply(sequence, host.pool, here, elsewhere, listener, host.scheduler.pull_to)

    def _elsewhere(self, sequence: KnownSequence, ordered: Ordered) -> list[Supplier]:
        """Returns the page source, and after it the peer, unless that is this worker or the source itself."""
        source, peer = ordered.source, ordered.peer
        suppliers: list[Supplier] = []
        if source is not None:
            suppliers.append(_PageSource(self._host, self._tasks, sequence, ordered, source))
        known = {self._host.config.worker_id, "" if source is None else source.worker_id}
        if peer is not None and peer.worker.worker_id not in known:
            suppliers.append(_Peer(self._host, self._tasks, sequence, ordered, peer))
        return suppliers


@dataclass(frozen=True, slots=True)
class _PageSource:
    host: SupplyHost
    tasks: asyncio.TaskGroup
    sequence: KnownSequence
    ordered: Ordered
    source: worker_pb2.PageSource

    @property
    def depth(self) -> int:
        return len(self.sequence.block_hashes)

    @property
    def expected(self) -> ExpectedPages | None:
        forecast = self.ordered.forecast
        if forecast is None or self.sequence.preemptions:
            return None
        link = self.host.pulls.links.of(WorkerId(self.source.worker_id))
        return ExpectedPages.of_source(forecast, self.depth, link, self.host.facts.page_bytes)

    def begin(self, parts: Sequence[Part], behind: Behind) -> list[Part]:
        if parts:
            ordered = self.ordered
            spec = replace(
                _spec(self.host, self.sequence, self.source, parts, ordered),
                peer=ordered.peer,
                deadline_s=ordered.deadline_s,
                weights=ordered.weights,
            )
            behind.pulling(self.host.pulls.start(spec, self.tasks))
        return []


@dataclass(frozen=True, slots=True)
class _Peer:
    """A supplier that serves from its cache alone."""

    host: SupplyHost
    tasks: asyncio.TaskGroup
    sequence: KnownSequence
    ordered: Ordered
    peer: PeerPrefix

    @property
    def depth(self) -> int:
        return self.peer.blocks

    @property
    def expected(self) -> ExpectedPages | None:
        link = self.host.pulls.links.of(WorkerId(self.peer.worker.worker_id))
        return ExpectedPages.of_peer(self.peer, link, self.host.facts.page_bytes)

    def begin(self, parts: Sequence[Part], behind: Behind) -> list[Part]:
        held = [part for part in parts if part.block < self.depth]
        if held:
            spec = replace(
                _spec(self.host, self.sequence, self.peer.worker, held, self.ordered),
                cached_within_s=ANSWER_S + self.host.loop.queued_s,
                arrived=self.ordered.arrived,
            )
            behind.pulling(self.host.pulls.start(spec, self.tasks))
        return [part for part in parts if part.block >= self.depth]


def _spec(
    host: SupplyHost,
    sequence: KnownSequence,
    source: worker_pb2.PageSource,
    parts: Sequence[Part],
    ordered: Ordered,
) -> PullSpec:
    return PullSpec(
        sequence.request_id,
        host.new_session(),
        source,
        list(sequence.known),
        list(sequence.block_hashes),
        sequence.pages_of(parts),
        trace=ordered.trace,
    )
