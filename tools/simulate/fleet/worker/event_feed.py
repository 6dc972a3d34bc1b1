"""What a simulated worker tells routers: the batches of its event log, each with a load report, and heartbeats.

This stands for the live event feed (`twostroke.worker.event_feed`) and the load reports of a live worker.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from tools.simulate.fleet.worker.interfaces import SimulatedWorkerView
from tools.simulate.fleet.worker.pulls import HostPulls
from tools.simulate.fleet.worker.steps import HostLoop
from twostroke.config import Role
from twostroke.kv_cache.events import EventBatch
from twostroke.kv_cache.groups.page_state import PageState
from twostroke.rpc.v1 import control_pb2

_PAGES = tuple((state, f"pages_{state.name.lower()}") for state in PageState)
"""Fields of a load report that count pages."""

Follower = Callable[[EventBatch, control_pb2.Load], None]


class ReportingWorker(SimulatedWorkerView, Protocol):
    loop: HostLoop
    pulls: HostPulls
    prefill_busy_s: float

    def add_to_report(self, load: control_pb2.Load) -> None:
        """Adds what only some workers have to say."""


class SimulatedEventFeed:
    def __init__(self, host: ReportingWorker) -> None:
        self._host = host
        self._followers: list[Follower] = []
        self._published_s = host.queue.now_s
        self._lasting: control_pb2.Load | None = None
        self._lasting_cost = host.loop.cost

    def follow(self, follower: Follower) -> None:
        """Tells the follower of every batch from now on."""
        self._followers.append(follower)

    def leave(self, follower: Follower) -> None:
        self._followers.remove(follower)

    def publish(self) -> None:
        if self._host.is_dead:
            return
        batch, load = self._host.log.publish(), self.load_report()
        self._published_s = self._host.queue.now_s
        for follower in self._followers:
            follower(batch, load)

    def beat(self) -> None:
        """Publishes a batch wherever none has been for as long as a heartbeat, until the worker dies."""
        host = self._host
        host.queue.after(host.shape.heartbeat_s, self._beat)

    def links_changed(self) -> None:
        """Notes that a pull has measured a link: the next report says it."""
        self._lasting = None

    def load_report(self) -> control_pb2.Load:
        """Returns the same message, in the same units, as a live worker's (twostroke.worker.host)."""
        host, scheduler, count = self._host, self._host.scheduler, self._host.pool.count
        queued = scheduler.load.queued()
        load = control_pb2.Load()
        load.CopyFrom(self._lasting_report())
        load.running = scheduler.running
        load.waiting = scheduler.waiting
        load.queued_tokens = queued.tokens + queued.stream_tokens
        for state, name in _PAGES:
            setattr(load, name, count(state))
        budget = host.loop.budget
        load.queued_s = budget.drain_s(queued, scheduler.step_tokens)
        load.costs.step_target_s = budget.step_s(queued.streams, queued.context_tokens)
        load.prefill_busy_s = host.prefill_busy_s
        each, stream_step = host.loop.stream_steps.each, load.stream_step
        stream_step.rows, stream_step.tokens, stream_step.before_s = each.rows, each.tokens, each.before_s
        host.add_to_report(load)
        return load

    def _lasting_report(self) -> control_pb2.Load:
        """Returns what stays the same from report to report, mostly."""
        host, cost = self._host, self._host.loop.cost
        if self._lasting is None or self._lasting_cost is not cost:
            self._lasting_cost = cost
            costs = control_pb2.StepCosts(**dataclasses.asdict(cost), step_tokens=host.scheduler.step_tokens)
            links = [
                control_pb2.LinkRate(worker_id=peer, latency_s=link.latency_s, bytes_per_s=link.bytes_per_s)
                for peer, link in host.pulls.links.known(host.queue.now_s).items()
            ]
            self._lasting = control_pb2.Load(
                state=control_pb2.WORKER_STATE_SERVING,
                pages_total=host.pool.total,
                slots=host.shape.max_num_seqs,
                max_waiting=host.config.schedule.max_waiting,
                costs=costs,
                links=links,
                conversion_page_s=host.shape.conversion_page_s if host.config.role is Role.PREFILL else 0.0,
            )
        return self._lasting

    def _beat(self) -> None:
        host = self._host
        if host.is_dead:
            return
        due_s = self._published_s + host.shape.heartbeat_s
        if due_s <= host.queue.now_s + 1e-9:
            self.publish()
            due_s = host.queue.now_s + host.shape.heartbeat_s
        host.queue.at(due_s, self._beat)
