"""The state of routing: which worker holds which blocks, and what routers have placed. The fleet updates it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

from router.metrics import ROLE, RouterMetrics
from router.routing.event_relay import EventRelay
from router.routing.prefix_index import Applied, PrefixIndex
from router.routing.reservation_exchange import ReservationFeed
from router.routing.reservations import Reservations
from twostroke.base.ids import Epoch, WorkerId
from twostroke.rpc.events import batch_from_message
from twostroke.rpc.membership import Membership
from twostroke.rpc.v1.control_pb2 import KvEventBatch
from twostroke.rpc.v1.fleet_pb2 import RouterEntry

log = logging.getLogger(__name__)

SWEEP_PAUSE_S = 0.01
"""Seconds between two sweeps of the index. Requests are routed meanwhile."""
LAG_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Buckets of the seconds until a batch is in the index: from one machine room to a replayed batch."""


class RoutingState:
    """Implements the fleet's `EventSink`."""

    def __init__(self, router_id: str, us: Membership, metrics: RouterMetrics) -> None:
        self.index = PrefixIndex()
        self._sweeping: asyncio.TimerHandle | None = None
        self.relay = EventRelay(self.index)
        self.reservations = Reservations()
        self._feed = ReservationFeed(router_id, us, self.reservations)
        self._metrics = IndexMetrics(metrics, self.index)
        metrics.other_routers.set_function(lambda: self._feed.flowing)
        metrics.foreign_reservations.set_function(lambda: self.reservations.foreign_count)
        metrics.reservations.set_function(lambda: len(self.reservations))

    def next_sequence(self, worker: WorkerId, epoch: Epoch) -> int | None:
        return self.index.next_sequence(worker, epoch)

    def apply(self, worker: WorkerId, epoch: Epoch, message: KvEventBatch) -> bool:
        verdict = self.index.apply(worker, epoch, batch_from_message(message))
        self._sweep_later()
        if verdict is Applied.PARTIAL:
            self.relay.publish(message)
            return True
        if verdict is Applied.APPLIED:
            if message.published_s > 0:  # clocks of two machines may disagree: one from the future counts as 0
                self._metrics.lag_s.observe(max(0.0, time.time() - message.published_s))
            if message.snapshot:
                self._metrics.count_snapshot(worker)
            self.relay.publish(message)
            return True
        self._metrics.troubles[verdict].labels(ROLE, worker).inc()
        if verdict is Applied.GAP:
            log.warning("events missing worker=%s before=%d", worker, message.sequence)
        elif verdict is Applied.DIVERGED:
            log.error("index diverged worker=%s sequence=%d: taking a snapshot", worker, message.sequence)
        return verdict is Applied.OLD

    def reported(self, worker: WorkerId, now_s: float) -> None:
        self.reservations.reported(worker, now_s)

    def forget(self, worker: WorkerId) -> None:
        self.relay.left(worker)
        self.index.forget(worker)
        self._sweep_later()

    def _sweep_later(self) -> None:
        """Schedules the next sweep, if blocks of gone workers are left in the index."""
        if self._sweeping is None and self.index.has_gone:
            self._sweeping = asyncio.get_running_loop().call_later(SWEEP_PAUSE_S, self._sweep)

    def _sweep(self) -> None:
        self._sweeping = None
        self.index.sweep()
        self._sweep_later()

    def block_count(self, worker: WorkerId) -> int:
        return self.index.block_count(worker)

    @property
    def other_routers(self) -> tuple[str, ...]:
        """Addresses of the cluster's other routers."""
        return self._feed.addresses

    def follow_routers(self, listed: Iterable[RouterEntry], tasks: asyncio.TaskGroup) -> None:
        self._feed.take(listed, tasks)


class IndexMetrics:
    def __init__(self, metrics: RouterMetrics, index: PrefixIndex) -> None:
        blocks = metrics.gauge("index_blocks", "Different block hashes in the prefix index, counted once per tier.")
        holdings = metrics.gauge(
            "index_holdings", "Blocks in the prefix index, counted once per tier and worker that holds them."
        )
        blocks.set_function(lambda: len(index))
        holdings.set_function(lambda: sum(index.block_count(worker) for worker in index.workers))
        self.lag_s = metrics.histogram(
            "event_lag_seconds",
            "A worker published a batch until it was in the index, by both wall clocks; replayed batches too.",
            LAG_BUCKETS_S,
        )
        counter = metrics.labelled_counter
        self._snapshots = counter("event_snapshots", "Snapshots taken over.", "worker")
        self.troubles = {
            Applied.OLD: counter("event_repeats", "Event batches that were in the index already.", "worker"),
            Applied.GAP: counter("event_gaps", "Event batches that did not follow on the last one.", "worker"),
            Applied.DIVERGED: counter(
                "event_divergences", "Batches whose count or digest did not match the index.", "worker"
            ),
        }

    def count_snapshot(self, worker: WorkerId) -> None:
        self._snapshots.labels(ROLE, worker).inc()
        for trouble in self.troubles.values():  # begins at 0: a counter that begins with its first event has no rate
            trouble.labels(ROLE, worker)
