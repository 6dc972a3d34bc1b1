"""One life of a simulated worker: the real pool, scheduler and event log; only the runner is a cost model.

The loop is the live one (twostroke.worker.steps.work_loop): admit, plan, run, update, notify, publish.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tools.simulate.fleet.event_queue import Entry, EventQueue
from tools.simulate.fleet.host_memory import HostMemory
from tools.simulate.fleet.pulls import Job, Party, Pull, PullSpec
from tools.simulate.fleet.shape import FleetShape
from tools.simulate.fleet.steps import SAMPLED, TOKEN, ChunksOnly, Flight, Pace
from tools.simulate.fleet.wire import Wire
from twostroke.config import Role, ScheduleConfig
from twostroke.ids import BlockHash, Epoch, PageId, SessionId, WorkerId
from twostroke.kv_cache.events import EventBatch, EventLog
from twostroke.kv_cache.pool import BlockPool, PageState
from twostroke.rpc.v1 import control_pb2
from twostroke.scheduler.batch import StepResult
from twostroke.scheduler.cost import Budget
from twostroke.scheduler.scheduler import Admission, Emission, Limits, Scheduler
from twostroke.scheduler.sequence import Sequence
from twostroke.worker.pulls.link_rates import LinkRates

MAX_MODEL_LEN = 1 << 30
"""No trace's prompt is refused for its length alone."""


class RoleActions(Protocol):
    """What a role does when the scheduler has news for it, and when somebody pulls."""

    def serve(self, spec: PullSpec) -> Job: ...

    def admitted(self, admission: Admission) -> None: ...

    def planning(self) -> None:
        """The next step is about to be chosen."""

    def preempted(self, sequence: Sequence) -> None: ...

    def emitted(self, flight: Flight, emissions: list[Emission]) -> None: ...

    def most_steps(self, flight: Flight) -> int:
        """How many equal steps may run before the role must be told."""


@dataclass(slots=True)
class Tally:
    """What a worker has done, over all of its lives."""

    busy_s: float = 0.0
    prefill_s: float = 0.0
    prefill_span_s: float = 0.0
    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    pulled_pages: int = 0
    served_pages: int = 0
    evicted_pages: int = 0
    preemptions: int = 0
    epochs: int = 0


class Host:
    def __init__(
        self,
        queue: EventQueue,
        shape: FleetShape,
        worker: WorkerId,
        role: Role,
        epoch: Epoch,
        tally: Tally,
    ) -> None:
        self.queue = queue
        self.shape = shape
        self.worker = worker
        self.role = role
        self.epoch = epoch
        self.tally = tally
        self.is_dead = False
        self.log = EventLog(epoch)
        pages = shape.prefill_pages if role is Role.PREFILL else shape.decode_pages
        self.pool = BlockPool(pages, self)
        config = ScheduleConfig(
            max_num_seqs=shape.max_num_seqs,
            max_num_batched_tokens=max(shape.step_tokens, shape.max_num_seqs + 1),
            step_target_ms=1e3 * shape.step_target_s,
        )
        limits = Limits(shape.block_size, MAX_MODEL_LEN, (), align_chunks=role is Role.PREFILL)
        self.scheduler = Scheduler(self.pool, config, limits, ChunksOnly())
        self.pace = Pace(shape.cost, shape.noise, f"{shape.seed} {worker} {epoch.incarnation}")
        self.wire = Wire(shape.link_bytes_per_s)
        self.links = LinkRates()
        self.served: dict[Pull, None] = {}
        self.pulls: dict[Pull, None] = {}
        self.prefill_busy_s = 0.0
        """Seconds of this epoch that steps spent on prompt tokens."""
        tier = shape.host_tier if role is Role.PREFILL else None
        self.host_memory = HostMemory(self, tier) if tier is not None else None
        self.budget = Budget(shape.step_target_s, shape.cost, config.step_tokens())
        self._sessions = itertools.count(1)
        self._actions: RoleActions | None = None
        self._followers: list[Callable[[EventBatch, control_pb2.Load], None]] = []
        self._flight: Flight | None = None
        self._end: Entry | None = None
        self._is_woken = False
        self._published_s = queue.now_s
        self._lasting = self._lasting_report()
        tally.epochs += 1

    def mount(self, actions: RoleActions) -> None:
        self._actions = actions
        self.queue.after(self.shape.heartbeat_s, self._beat)

    @property
    def actions(self) -> RoleActions:
        assert self._actions is not None
        return self._actions

    def follow(self, follower: Callable[[EventBatch, control_pb2.Load], None]) -> None:
        """Be told of every batch from now on."""
        self._followers.append(follower)

    def leave(self, follower: Callable[[EventBatch, control_pb2.Load], None]) -> None:
        self._followers.remove(follower)

    def new_session(self) -> SessionId:
        return SessionId(next(self._sessions))

    def wake(self) -> None:
        """Something changed that the next plan should see."""
        if self.is_dead:
            return
        if self._flight is not None:
            self._cut()
        elif not self._is_woken:
            self._is_woken = True
            self.queue.at(self.queue.now_s, self._begin_if_idle)

    def progressed(self) -> None:
        """Blocks may have become readable: whoever pulls them hears of it, and routers do."""
        for pull in list(self.served):
            pull.announce()
        if self.log.has_changes:
            self.publish()

    def publish(self) -> None:
        batch, load = self.log.publish(), self.load_report()
        self._published_s = self.queue.now_s
        for follower in self._followers:
            follower(batch, load)

    def load_report(self) -> control_pb2.Load:
        """The same message, in the same units, as a live worker's (twostroke.worker.host)."""
        scheduler, count = self.scheduler, self.pool.count
        queued = scheduler.queued()
        load = control_pb2.Load()
        load.CopyFrom(self._lasting)
        load.running = scheduler.running
        load.waiting = scheduler.waiting
        load.queued_tokens = queued.tokens + queued.stream_tokens
        load.pages_free = count(PageState.FREE)
        load.pages_cached = count(PageState.CACHED)
        load.pages_arriving = count(PageState.ARRIVING)
        load.pages_active = count(PageState.ACTIVE)
        load.pages_quarantined = count(PageState.QUARANTINED)
        load.queued_s = self.budget.drain_s(queued, scheduler.step_tokens)
        load.prefill_busy_s = self.prefill_busy_s
        return load

    @property
    def queued_s(self) -> float:
        """Predicted: until every prompt token that is to be computed here is computed."""
        return self.budget.drain_s(self.scheduler.queued(), self.scheduler.step_tokens)

    # The ends of pulls

    def pull(self, spec: PullSpec) -> Pull:
        pull = Pull(self, spec)
        self.pulls[pull] = None
        pull.start()
        return pull

    def pull_ended(self, pull: Pull) -> None:
        del self.pulls[pull]

    def prune(self) -> None:
        """Stop pulls whose missing pages nobody wants any more."""
        for pull in list(self.pulls):
            if not any(map(self.pool.is_wanted, pull.remaining.values())):
                pull.stop()

    def serve(self, spec: PullSpec) -> Job:
        return self.actions.serve(spec)

    def copied(self, source: Party, pages: int, seconds: float) -> None:
        self.tally.pulled_pages += pages
        self.links.copied(source.worker, pages * self.shape.page_bytes, seconds, self.queue.now_s)
        self._lasting = self._lasting_report()

    def gave(self, pages: int) -> None:
        self.tally.served_pages += pages

    def answered(self, source: Party, latency_s: float) -> None:
        self.links.answered(source.worker, latency_s, self.queue.now_s)

    # What the pool tells

    def stored(self, name: BlockHash) -> None:
        self.log.stored(name)

    def removed(self, name: BlockHash) -> None:
        self.tally.evicted_pages += 1
        self.log.removed(name)
        if self.host_memory is not None:
            self.host_memory.keep(name)

    def new_writer(self, page: PageId) -> None:
        """Generations are nobody's concern here."""

    # Life and death

    def die(self) -> None:
        """At once and without a word; peers notice later."""
        self.account(self.steps_done())
        self.is_dead = True
        if self._end is not None:
            self._end.cancel()
        delay_s = self.shape.delays.detection_s
        for pull in [*self.served]:
            self.queue.after(delay_s, pull.fail)
        for pull in [*self.pulls]:
            self.queue.after(delay_s, pull.release_source)

    def steps_done(self) -> Flight | None:
        """What has run of the steps under way, as a flight of its own."""
        flight = self._flight
        steps = flight.ended_by(self.queue.now_s) if flight is not None else 0
        if flight is None or not steps:
            return None
        return Flight(
            flight.step, flight.terms, flight.begun_s, flight.first_s, flight.growth_s, flight.prompt_share,
            flight.noisy, steps,
        )  # fmt: skip

    def account(self, flight: Flight | None) -> None:
        if flight is None:
            return
        seconds, tally = flight.after(flight.steps), self.tally
        tally.busy_s += seconds
        tally.prefill_s += seconds * flight.prompt_share
        tally.steps += flight.steps
        tally.prompt_tokens += flight.terms.prompt_tokens
        tally.output_tokens += flight.terms.streams * flight.steps
        self.prefill_busy_s += seconds * flight.prompt_share

    def _lasting_report(self) -> control_pb2.Load:
        """What stays the same from report to report, mostly."""
        shape = self.shape
        costs = control_pb2.StepCosts(
            **dataclasses.asdict(shape.cost), step_tokens=self.scheduler.step_tokens, step_target_s=shape.step_target_s
        )
        links = [
            control_pb2.LinkRate(worker_id=peer, latency_s=link.latency_s, bytes_per_s=link.bytes_per_s)
            for peer, link in self.links.known(self.queue.now_s).items()
        ]
        return control_pb2.Load(
            state=control_pb2.WORKER_STATE_SERVING,
            pages_total=self.pool.total,
            slots=shape.max_num_seqs,
            costs=costs,
            links=links,
            tiers=[self.host_memory.rate] if self.host_memory is not None else [],
        )

    # Below: the loop

    def _begin_if_idle(self) -> None:
        self._is_woken = False
        if self._flight is None and not self.is_dead:
            self._begin()
            self.progressed()

    def _begin(self) -> None:
        """Admit, and start the next steps."""
        actions, scheduler = self.actions, self.scheduler
        admitted = scheduler.admit()
        for admission in admitted:
            actions.admitted(admission)
        actions.planning()
        step = scheduler.plan(self.budget)
        preempted = scheduler.take_preempted()
        for sequence in preempted:
            self.tally.preemptions += 1
            actions.preempted(sequence)
        if step is None:
            if preempted:
                self.wake()  # their pages may admit others
            return
        may_admit_more = bool(preempted or (admitted and scheduler.waiting))
        repeats = 0 if may_admit_more else scheduler.repeats(step)
        flight = self.pace.flight(step, self.queue.now_s, repeats)
        flight.steps = min(flight.steps, actions.most_steps(flight))
        self._flight = flight
        self._end = self.queue.at(flight.end_s, self._ended)

    def _cut(self) -> None:
        flight = self._flight
        assert flight is not None
        assert self._end is not None
        if flight.steps > 1 and flight.cut(self.queue.now_s):
            self._end.cancel()
            self._end = self.queue.at(flight.end_s, self._ended)

    def _ended(self) -> None:
        flight = self._flight
        assert flight is not None
        self._flight = None
        step = flight.step
        if flight.steps > 1:
            step = self.scheduler.run_ahead(step, flight.steps - 1, TOKEN)
        emissions = self.scheduler.update(step, StepResult((SAMPLED,) * flight.terms.streams, 0.0))
        self.account(flight)
        self._begin()
        self.actions.emitted(flight, emissions)
        self.progressed()

    def _beat(self) -> None:
        if self.is_dead:
            return
        due_s = self._published_s + self.shape.heartbeat_s
        if due_s <= self.queue.now_s + 1e-9:
            self.publish()
            due_s = self.queue.now_s + self.shape.heartbeat_s
        self.queue.at(due_s, self._beat)

    def check_quiet(self) -> None:
        """Assert that nothing is held and nobody waits."""
        pool = self.pool
        pool.check_integrity()
        assert not self.scheduler.running, f"{self.worker} still runs {self.scheduler.running} sequences"
        assert not self.scheduler.waiting, f"at {self.worker} {self.scheduler.waiting} sequences still wait"
        assert not self.pulls, f"{self.worker} still pulls"
        assert not self.served, f"{self.worker} still serves pulls"
        held = pool.total - pool.count(PageState.FREE) - pool.count(PageState.CACHED)
        assert not held, f"{held} pages of {self.worker} are still held"
