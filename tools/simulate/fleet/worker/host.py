"""One epoch of a simulated worker: the live role on the live pool, scheduler and event log.

Only its work loop (`steps`), its pull client (`pulls`) and its clock are the simulator's. What the role and the routers
see of it is what `twostroke.worker.host` shows them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from decode_worker.request_manager import RequestManager
from prefill_worker.jobs import BuildJobs
from router.serving.placement import source_forecast
from tools.simulate.fleet.event_queue import EventQueue, VirtualLoop
from tools.simulate.fleet.results import WorkerUse
from tools.simulate.fleet.shape import FleetShape, SharedCores
from tools.simulate.fleet.simulated_request import SimulatedRequest
from tools.simulate.fleet.worker.core_device import CoreDevice, calibrated_rates
from tools.simulate.fleet.worker.cores import HostCores
from tools.simulate.fleet.worker.drafts import drafts_of
from tools.simulate.fleet.worker.live_loop import LiveLoop
from tools.simulate.fleet.worker.pulls import Converter, SimulatedPull, SimulatedPulls, Wire
from tools.simulate.fleet.worker.steps import ChunksOnly, Flight, SimulatedLoop, StepPace, StepWatch
from tools.simulate.fleet.worker.tiers import SimulatedDisk, SimulatedTiers
from tools.simulate.fleet.worker.tokens import Hear, TokenTimes, read_tokens
from twostroke.config import SPECULATE_OFF, Role, ScheduleConfig, WorkerConfig
from twostroke.engine.build import LoadedModel
from twostroke.engine.determinism import PACED
from twostroke.ids import BlockHash, Epoch, PageId, RequestId, SessionId, WorkerId
from twostroke.kv_cache.events import EventBatch, EventLog
from twostroke.kv_cache.form import KvForm
from twostroke.kv_cache.page_state import PageState
from twostroke.kv_cache.pool import BlockPool
from twostroke.rpc.peer import PeerPrefix
from twostroke.rpc.v1 import control_pb2, worker_pb2
from twostroke.scheduler.batching import BatchBuilder, StepBuilder
from twostroke.scheduler.cost import Budget, Queued, StepCost
from twostroke.scheduler.scheduler import Scheduler
from twostroke.scheduler.sequence import Sequence as KnownSequence
from twostroke.scheduler.step_target import StepTarget
from twostroke.scheduler.values import AdmittedSequence, SchedulerLimits
from twostroke.tracing.recorder import Recorder
from twostroke.worker.metrics import WorkerMetrics
from twostroke.worker.pulls.link_rates import LinkRates
from twostroke.worker.pulls.ordered_pull import OrderedPull
from twostroke.worker.pulls.pages_service import CachedOnlyJob, PageJob, RequestedBlocks
from twostroke.worker.role_host import Loop, Pulls
from twostroke.worker.steps.sharing import Sharing
from twostroke.worker.steps.stream_steps import StreamSteps
from twostroke.worker.steps.work_loop import RoleHandlers as RoleActions
from twostroke.worker.tiers.prefetch import Prefetch

MAX_MODEL_LEN = 1 << 30
"""No trace's prompt is refused for its length alone."""


class _NoPrefetch:
    """A worker without tiers has nothing to prefetch."""

    def begin_admission(self, waiting: Sequence[KnownSequence]) -> None: ...

    def end_admission(self, running: int) -> None: ...

    def stop(self) -> None: ...


Follower = Callable[[EventBatch, control_pb2.Load], None]


class HostPulls(Pulls, Protocol):
    """A pull client, and what serves the pulls of others."""

    links: LinkRates

    def __len__(self) -> int: ...

    def announce(self) -> None:
        """Blocks may have become readable: whoever pulls them from here hears of it."""

    def break_off(self) -> None:
        """The worker has died, and its peers have noticed."""


class HostLoop(Loop, Protocol):
    @property
    def cost(self) -> StepCost:
        """What steps cost, as far as the worker knows."""

    @property
    def stream_steps(self) -> StreamSteps: ...

    def run(self, role: RoleActions, watch: StepWatch) -> None:
        """Work for the role from now on."""

    def stop(self) -> Flight | None:
        """The worker dies. Returns what has run of the steps under way."""


class Parts(Protocol):
    """What runs the steps and the pulls of a simulated worker."""

    def step_builder(self, host: SimulatedHost) -> StepBuilder: ...
    def loop(self, host: SimulatedHost) -> HostLoop: ...
    def pulls(self, host: SimulatedHost) -> HostPulls: ...


class FastParts:
    """Many equal steps at once, and pulls without messages."""

    def step_builder(self, host: SimulatedHost) -> StepBuilder:
        return ChunksOnly()

    def loop(self, host: SimulatedHost) -> HostLoop:
        return SimulatedLoop(host.queue, host.scheduler, host.pace, host.budget, host.shape.block_size, host.notify)

    def pulls(self, host: SimulatedHost) -> HostPulls:
        return SimulatedPulls(host)


class SharedCoreParts(FastParts):
    """All workers compute on one host's cores: the live work loops share them step by step."""

    def __init__(self, shared: SharedCores, queue: EventQueue) -> None:
        self._shared = shared
        self._cores = HostCores(queue)

    def step_builder(self, host: SimulatedHost) -> StepBuilder:
        return BatchBuilder(host.shape.block_size, host.facts.pages, ())

    def loop(self, host: SimulatedHost) -> HostLoop:
        rates, device = calibrated_rates(host), CoreDevice(host, self._shared, self._cores)
        target = StepTarget(self._shared.step_target_s, host.shape.slo_itl_s)
        sharing = Sharing(host.scheduler, rates, target, host.virtual_loop.time, device)
        return LiveLoop(host, device, sharing, rates)


def parts_of(shape: FleetShape, queue: EventQueue) -> Parts:
    return FastParts() if shape.cores is None else SharedCoreParts(shape.cores, queue)


@dataclass(slots=True)
class SharedFleet:
    """What all simulated workers share."""

    queue: EventQueue
    shape: FleetShape
    parts: Parts
    requests: dict[RequestId, SimulatedRequest] = field(default_factory=dict)
    hosts: dict[WorkerId, SimulatedHost] = field(default_factory=dict)
    """The latest epoch of each worker that there has been."""
    gaps: Counter[int] = field(default_factory=Counter)
    loop: VirtualLoop = field(init=False)

    disks: dict[WorkerId, SimulatedDisk] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.loop = VirtualLoop(self.queue)  # type: ignore[abstract]  # nobody calls the rest

    def disk_of(self, worker: WorkerId, shape: FleetShape) -> SimulatedDisk | None:
        """The disk of all epochs of a worker; None where the fleet's workers have none."""
        if not shape.tiers.disk_bytes:
            return None
        return self.disks.setdefault(worker, SimulatedDisk(self.queue, shape))


class SimulatedHost:
    determinism = PACED

    def __init__(self, fleet: SharedFleet, worker: WorkerId, epoch: Epoch, use: WorkerUse) -> None:
        role, queue = use.role, fleet.queue
        shape = fleet.shape.of_role(role)
        self._fleet = fleet
        self.queue = queue
        self.virtual_loop = fleet.loop
        self.shape = shape
        self.worker = worker
        self.epoch = epoch
        self.use = use
        self.is_dead = False
        self.config = _config(shape, worker, role)
        self.metrics = WorkerMetrics(role, shape.block_size)
        self.recorder = Recorder()
        self.log = EventLog(epoch)
        pages = shape.prefill_pages if role is Role.PREFILL else shape.decode_pages
        self.facts = _facts(shape, pages, shape.kv_form(role))
        self.pool = BlockPool(pages, self)
        limits = SchedulerLimits(shape.block_size, MAX_MODEL_LEN, (), align_chunks=role is Role.PREFILL)
        self.scheduler = Scheduler(self.pool, self.config.schedule, limits, fleet.parts.step_builder(self))
        self.wire = Wire(shape.link_bytes_per_s)
        self.pace = StepPace(shape.cost, shape.noise, f"{shape.seed} {worker} {epoch.incarnation}")
        self.budget = Budget(shape.step_target_s, shape.cost, self.config.schedule.step_tokens())
        self.converter = Converter(shape.conversion_page_s)
        self.served: dict[SimulatedPull, None] = {}
        self.pulls = fleet.parts.pulls(self)
        self.loop = fleet.parts.loop(self)
        self.prefill_busy_s = 0.0
        """Seconds of this epoch's steps that went to prompt tokens."""
        disk = fleet.disk_of(worker, shape)
        has_tiers = disk is not None or shape.tiers.host_bytes > 0
        self.tiers = SimulatedTiers(self, disk) if has_tiers else None
        self.loads = None if self.tiers is None else self.tiers.loads()
        self.prefetch: Prefetch | _NoPrefetch = _NoPrefetch()
        if self.tiers is not None and self.loads is not None:
            self.prefetch = self.tiers.prefetch(self.loads)
        self._drafts = drafts_of(shape, role, f"{worker} {epoch.incarnation}")
        self._sessions = itertools.count(1)
        self._times = TokenTimes(fleet.requests, fleet.gaps)
        self._open: dict[RequestId, SimulatedRequest] = {}
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._followers: list[Follower] = []
        self._published_s = queue.now_s
        self._lasting: control_pb2.Load | None = None
        self._lasting_cost = self.loop.cost
        tasks = asyncio.TaskGroup()  # the simulated pull client has no use for it
        self.request_manager = RequestManager(self, tasks) if role is Role.DECODE else None
        self.actions = self.request_manager or BuildJobs(self, tasks)
        self.loop.run(self.actions, self)
        queue.after(shape.heartbeat_s, self._beat)
        use.epochs += 1

    @property
    def role(self) -> Role:
        return self.config.role

    @property
    def is_idle(self) -> bool:
        return not (self.scheduler.running or self.scheduler.waiting or len(self.pulls))

    # What a role uses besides

    @property
    def progress(self) -> SimulatedHost:
        return self

    @property
    def feed(self) -> SimulatedHost:
        return self

    def new_session(self) -> SessionId:
        return SessionId(next(self._sessions))

    def notify(self) -> None:
        """Blocks may have become readable: whoever pulls them hears of it, and routers do."""
        self.pulls.announce()
        if self.log.has_changes:
            self.publish()

    def publish(self) -> None:
        if self.is_dead:
            return
        batch, load = self.log.publish(), self.load_report()
        self._published_s = self.queue.now_s
        for follower in self._followers:
            follower(batch, load)

    # What routers use

    def follow(self, follower: Follower) -> None:
        """Be told of every batch from now on."""
        self._followers.append(follower)

    def leave(self, follower: Follower) -> None:
        self._followers.remove(follower)

    def open(
        self, request: SimulatedRequest, router_id: str, source: SimulatedHost | None, peer: SimulatedHost | None
    ) -> None:
        """Raises Overloaded."""
        assert self.request_manager is not None
        assert request.placement is not None
        decision = request.placement.decision
        prefix = None
        if peer is not None:
            prefix = PeerPrefix(peer.page_source(), decision.peer_blocks, decision.forecast.peer_load_s)
        page_source = None if source is None else source.page_source()
        self.request_manager.open(request.to_open(router_id), page_source, prefix, source_forecast(decision))
        request.has_begun, request.peer_pages = False, 0
        self._open[request.request_id] = request

    def close(self, request: SimulatedRequest) -> None:
        """Its router went away, or nobody wants it."""
        assert self.request_manager is not None
        if self._open.pop(request.request_id, None) is not None:
            self.request_manager.close_request(request.request_id, request.attempts)

    def stream(self, router_id: str, hear: Hear) -> None:
        """Tell a router of all tokens of its answers, from now on; it has one such stream."""
        if self.request_manager is not None and router_id not in self._streams:
            reading = read_tokens(self.request_manager, router_id, hear)
            self._streams[router_id] = self.virtual_loop.create_task(reading)

    def end_stream(self, router_id: str) -> None:
        reading = self._streams.pop(router_id, None)
        if reading is not None:
            reading.cancel()

    def end_streams(self) -> None:
        for router_id in list(self._streams):
            self.end_stream(router_id)

    def page_source(self) -> worker_pb2.PageSource:
        return worker_pb2.PageSource(worker_id=self.worker, address=self.worker, epoch=str(self.epoch))

    def load_report(self) -> control_pb2.Load:
        """The same message, in the same units, as a live worker's (twostroke.worker.host)."""
        scheduler, count = self.scheduler, self.pool.count
        queued = scheduler.queued()
        load = control_pb2.Load()
        load.CopyFrom(self._lasting_report())
        load.running = scheduler.running
        load.waiting = scheduler.waiting
        load.queued_tokens = queued.tokens + queued.stream_tokens
        load.pages_free = count(PageState.FREE)
        load.pages_cached = count(PageState.CACHED)
        load.pages_arriving = count(PageState.ARRIVING)
        load.pages_active = count(PageState.ACTIVE)
        load.pages_quarantined = count(PageState.QUARANTINED)
        load.pages_pinned = count(PageState.PINNED)
        budget = self.loop.budget
        load.queued_s = budget.drain_s(queued, scheduler.step_tokens)
        load.costs.step_target_s = budget.step_s(queued.streams, queued.context_tokens)
        load.prefill_busy_s = self.prefill_busy_s
        load.stream_step.CopyFrom(control_pb2.StreamStep(**dataclasses.asdict(self.loop.stream_steps.each)))
        if self.tiers is not None:
            load.tiers.extend(self.tiers.rates())
        return load

    # What pulls use

    def party(self, worker: WorkerId) -> SimulatedHost:
        return self._fleet.hosts[worker]

    def wake(self) -> None:
        if not self.is_dead:
            self.loop.wake()

    def compute_s(self, queued: Queued) -> float:
        """Seconds of computing prompts here beside the streams of now, as a live worker predicts them."""
        now = self.scheduler.queued()
        beside = dataclasses.replace(queued, streams=now.streams, context_tokens=now.context_tokens)
        return self.loop.budget.drain_s(beside, self.scheduler.step_tokens)

    def serve(self, wanted: RequestedBlocks, *, is_from_cache: bool) -> PageJob:
        if is_from_cache:
            return CachedOnlyJob(self.pool, wanted, self.wake, self.loads)
        return self.actions.begin(wanted)

    def gave(self, pages: int) -> None:
        self.use.served_pages += pages

    def pulled(self, pages: int) -> None:
        self.use.pulled_pages += pages
        self._lasting = None

    def pulled_from_peer(self, request_id: RequestId) -> None:
        request = self._fleet.requests.get(request_id)
        if request is not None:
            request.peer_pages += 1

    # What the pool tells

    def stored(self, block: BlockHash) -> None:
        self.log.stored(block)
        if self.tiers is not None:
            self.tiers.saw(block)

    def removed(self, block: BlockHash) -> None:
        self.use.evicted_pages += 1
        self.converter.forget(block)
        self.log.removed(block)

    def evicting(self, page: PageId, block: BlockHash, parent: BlockHash) -> None:
        if self.tiers is not None:
            self.tiers.evicting(block, parent)

    def forgotten(self, block: BlockHash) -> None:
        """A simulated request never ends in an error of the model: nothing is to be forgotten everywhere."""

    def new_writer(self, page: PageId) -> None:
        """No page is ever read after it was reused: there is no generation to count."""

    # What the loop tells

    def admitting(self, admission: AdmittedSequence, pull: OrderedPull | None) -> AdmittedSequence:
        if self._drafts is not None and admission.sequence.speculation is None:
            admission.sequence.speculation = self._drafts.speculation()
        return admission if self.loads is None else self.loads.admitting(admission, pull)

    def most_steps(self, flight: Flight) -> int:
        """A first token is told of at once."""
        return 1 if self.request_manager is not None and self._times.has_first(flight) else flight.steps

    def preempted(self) -> None:
        self.use.preemptions += 1

    def ran(self, flight: Flight) -> None:
        seconds, use = flight.after(flight.steps), self.use
        use.busy_s += seconds
        use.prefill_s += seconds * flight.prompt_share
        use.steps += flight.steps
        use.prompt_tokens += flight.terms.prompt_tokens
        use.output_tokens += flight.tokens
        self.prefill_busy_s += seconds * flight.prompt_share
        if self.request_manager is not None:
            self._times.count(flight)

    # Death, and the end of a run

    def answered(self, request_id: RequestId) -> None:
        self._open.pop(request_id, None)

    def die(self) -> list[SimulatedRequest]:
        """At once and without a word; peers notice later. Returns the requests that it owned."""
        done = self.loop.stop()
        if done is not None:
            self.ran(done)
        self.is_dead = True
        self.prefetch.stop()
        if self.loads is not None:
            self.loads.stop()
        self.end_streams()
        self.queue.after(self.shape.delays.detection_s, self.pulls.break_off)
        return list(self._open.values())

    def check_quiet(self) -> None:
        """Assert that nothing is held and nobody waits."""
        pool = self.pool
        pool.check_integrity()
        assert not self.scheduler.running, f"{self.worker} still runs {self.scheduler.running} sequences"
        assert not self.scheduler.waiting, f"at {self.worker} {self.scheduler.waiting} sequences still wait"
        assert not len(self.pulls), f"{self.worker} still pulls, or serves pulls"
        held = pool.total - pool.unheld
        assert not held, f"{held} pages of {self.worker} are still held"

    def _lasting_report(self) -> control_pb2.Load:
        """What stays the same from report to report, mostly."""
        cost = self.loop.cost
        if self._lasting is None or self._lasting_cost is not cost:
            shape, self._lasting_cost = self.shape, cost
            costs = control_pb2.StepCosts(**dataclasses.asdict(cost), step_tokens=self.scheduler.step_tokens)
            links = [
                control_pb2.LinkRate(worker_id=peer, latency_s=link.latency_s, bytes_per_s=link.bytes_per_s)
                for peer, link in self.pulls.links.known(self.queue.now_s).items()
            ]
            self._lasting = control_pb2.Load(
                state=control_pb2.WORKER_STATE_SERVING,
                pages_total=self.pool.total,
                slots=shape.max_num_seqs,
                max_waiting=self.config.schedule.max_waiting,
                costs=costs,
                links=links,
                conversion_page_s=shape.conversion_page_s if self.role is Role.PREFILL else 0.0,
            )
        return self._lasting

    def _beat(self) -> None:
        if self.is_dead:
            return
        due_s = self._published_s + self.shape.heartbeat_s
        if due_s <= self.queue.now_s + 1e-9:
            self.publish()
            due_s = self.queue.now_s + self.shape.heartbeat_s
        self.queue.at(due_s, self._beat)


def _config(shape: FleetShape, worker: WorkerId, role: Role) -> WorkerConfig:
    schedule = ScheduleConfig(
        speculate=SPECULATE_OFF,  # simulated tokens are all alike
        max_num_seqs=shape.max_num_seqs,
        max_num_batched_tokens=max(shape.step_tokens, shape.max_num_seqs + 1),
        step_target_ms=1e3 * shape.step_target_s,
        local_prefill=shape.local_prefill,
    )
    return WorkerConfig(
        role=role, worker_id=worker, schedule=schedule, slo_ttft_s=shape.slo_ttft_s, slo_itl_s=shape.slo_itl_s
    )


def _facts(shape: FleetShape, pages: int, kv_form: KvForm) -> LoadedModel:
    return LoadedModel(
        name="simulated",
        max_model_len=MAX_MODEL_LEN,
        vocab_size=1,
        eos_token_ids=(),
        dtype="",
        kv_form=kv_form,
        block_size=shape.block_size,
        page_bytes=shape.page_bytes,
        pages=pages,
        advice="",
        fingerprint="",
    )
