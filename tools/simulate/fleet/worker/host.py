"""One epoch of a simulated worker: the live role on the live pool, scheduler and event log.

Its work loop (`steps`), its pull client (`pulls`) and its clock are the simulator's, and so is what routers reach:
`event_feed` and `decode_service`. What the role sees of it is what `twostroke.worker.host` shows.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from decode_worker.request_manager import RequestManager
from prefill_worker.jobs import BuildJobs
from tools.simulate.fleet.event_queue import EventQueue, VirtualLoop
from tools.simulate.fleet.results import WorkerUse
from tools.simulate.fleet.shape import FleetShape, SharedCores
from tools.simulate.fleet.simulated_request import SimulatedRequest
from tools.simulate.fleet.worker.branches import SCHEDULE, proposers_of, scheduler_branches
from tools.simulate.fleet.worker.decode_service import SimulatedDecodeService
from tools.simulate.fleet.worker.event_feed import SimulatedEventFeed
from tools.simulate.fleet.worker.live_loop import LiveLoop
from tools.simulate.fleet.worker.pulls import Converter, HostPulls, SimulatedPull, SimulatedPulls, Wire
from tools.simulate.fleet.worker.shared_cores.core_device import CoreDevice, calibrated_rates
from tools.simulate.fleet.worker.shared_cores.cores import HostCores
from tools.simulate.fleet.worker.steps import ChunksOnly, Flight, HostLoop, SimulatedLoop, StepLengths, StepPace
from tools.simulate.fleet.worker.tiers import SimulatedDisk, SimulatedTiers
from tools.simulate.fleet.worker.tokens import SimulatedStream, TokenTimes
from twostroke.base.ids import BlockHash, Epoch, PageId, RequestId, SessionId, WorkerId
from twostroke.config import Role, ScheduleConfig, WorkerConfig
from twostroke.engine.backends.facts import LoadedModel
from twostroke.engine.determinism import PACED
from twostroke.kv_cache.events import EventLog
from twostroke.kv_cache.form import KvForm
from twostroke.kv_cache.pool import BlockPool
from twostroke.rpc.v1 import control_pb2, worker_pb2
from twostroke.scheduler.batching import BatchBuilder, StepBuilder
from twostroke.scheduler.cost import Budget, Queued
from twostroke.scheduler.scheduler import Scheduler
from twostroke.scheduler.sequence import Constraint
from twostroke.scheduler.sequence import Sequence as KnownSequence
from twostroke.scheduler.step_target import StepTarget
from twostroke.scheduler.values import AdmittedSequence, SchedulerLimits
from twostroke.tracing.recorder import Recorder
from twostroke.worker.metrics import WorkerMetrics
from twostroke.worker.services.pages_service import CachedOnlyJob, PageJob, RequestedBlocks
from twostroke.worker.steps.sharing import TimeSharing
from twostroke.worker.supply.supply import Supplier
from twostroke.worker.tiers.loads.prefetch import Prefetch
from twostroke.worker.tiers.metrics import tier_rates

MAX_MODEL_LEN = 1 << 30
"""No trace's prompt is refused for its length."""


class _NoPrefetch:
    """A worker without tiers has nothing to prefetch."""

    admits_beside_steps = True

    def begin_admission(self, waiting: Sequence[KnownSequence]) -> None: ...

    def end_admission(self, running: int) -> None: ...

    def stop(self) -> None: ...


class Parts(Protocol):
    """What runs the steps and the pulls of a simulated worker."""

    @property
    def lengths(self) -> StepLengths | None:
        """What steps take; None: what the shape's costs say."""

    def step_builder(self, host: SimulatedHost) -> StepBuilder: ...
    def loop(self, host: SimulatedHost) -> HostLoop: ...
    def pulls(self, host: SimulatedHost) -> HostPulls: ...


class FastParts:
    """Many equal steps at once, and pulls without messages."""

    def __init__(self, lengths: StepLengths | None = None) -> None:
        self.lengths = lengths

    def step_builder(self, host: SimulatedHost) -> StepBuilder:
        return ChunksOnly()

    def loop(self, host: SimulatedHost) -> HostLoop:
        return SimulatedLoop(host)

    def pulls(self, host: SimulatedHost) -> HostPulls:
        return SimulatedPulls(host)


class SharedCoreParts(FastParts):
    """All workers compute on one host's cores: the live work loops share them step by step."""

    def __init__(self, shared: SharedCores, queue: EventQueue) -> None:
        super().__init__()
        self._shared = shared
        self._cores = HostCores(queue)

    def step_builder(self, host: SimulatedHost) -> StepBuilder:
        return BatchBuilder(host.shape.block_size, host.facts.pages, ())

    def loop(self, host: SimulatedHost) -> HostLoop:
        rates, device = calibrated_rates(host), CoreDevice(host, self._shared, self._cores)
        target = StepTarget(self._shared.step_target_s, host.shape.slo_itl_s)
        sharing = TimeSharing(host.scheduler, rates, target, host.virtual_loop.time, device)
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
        """Returns the disk of all epochs of a worker; None where the fleet's workers have none."""
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
        self.use, self.is_dead = use, False
        self.config = _config(shape, worker, role)
        self.metrics = WorkerMetrics(role, shape.block_size)
        self.recorder = Recorder()
        self.log = EventLog(epoch)
        pages = shape.prefill_pages if role is Role.PREFILL else shape.decode_pages
        self.facts = _facts(shape, pages, shape.kv_form(role))
        self.pool = BlockPool(pages, self)
        limits = SchedulerLimits(shape.block_size, MAX_MODEL_LEN, (), align_chunks=role is Role.PREFILL)
        self._new_proposer = proposers_of(shape, role, f"{worker} {epoch.incarnation}")
        self.scheduler = Scheduler(
            self.pool, self.config.schedule, limits, fleet.parts.step_builder(self), branches=scheduler_branches(limits)
        )
        self.wire = Wire(shape.link_bytes_per_s)
        self.pace = StepPace(shape.cost, shape.noise, f"{shape.seed} {worker} {epoch.incarnation}", fleet.parts.lengths)
        self.budget = Budget(shape.step_target_s, shape.cost, self.config.schedule.step_tokens())
        self.converter = Converter(shape.conversion_page_s)
        self.served: dict[SimulatedPull, None] = {}
        self.changed: list[SimulatedPull] = []
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
        self._sessions = itertools.count(1)
        self._times = TokenTimes(fleet.requests, fleet.gaps)
        self.feed = SimulatedEventFeed(self)
        tasks = asyncio.TaskGroup()  # the simulated pull client has no use for it
        self.decode_service: SimulatedDecodeService | None = None
        self.actions: RequestManager | BuildJobs
        if role is Role.DECODE:
            self.actions = manager = RequestManager(self, tasks, SimulatedStream)
            self.decode_service = SimulatedDecodeService(manager, self.virtual_loop)
        else:
            self.actions = BuildJobs(self, tasks)
        self.loop.run(self.actions, self)
        self.feed.beat()
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
    def branches(self) -> SimulatedHost:
        return self

    def new_session(self) -> SessionId:
        return SessionId(next(self._sessions))

    def constraints_of(self, *_: object) -> tuple[Constraint, ...]:
        """Returns nothing: no simulated request asks for anything besides tokens."""
        return ()

    def notify(self) -> None:
        """Tells pulling workers and routers that blocks may have become readable."""
        self.pulls.announce()
        if self.log.has_changes:
            self.feed.publish()

    def page_source(self) -> worker_pb2.PageSource:
        return worker_pb2.PageSource(worker_id=self.worker, address=self.worker, epoch=str(self.epoch))

    def add_to_report(self, load: control_pb2.Load) -> None:
        if self.tiers is not None:
            load.tiers.extend(tier_rates(self.tiers.uses()))

    # What pulls use

    def party(self, worker: WorkerId) -> SimulatedHost:
        return self._fleet.hosts[worker]

    def wake(self) -> None:
        if not self.is_dead:
            self.loop.wake()
            self.pulls.announce()  # pages that came from elsewhere

    def compute_s(self, queued: Queued) -> float:
        """Returns the seconds of computing prompts here beside the current streams, as a live worker predicts them."""
        now = self.scheduler.load.queued()
        beside = dataclasses.replace(queued, streams=now.streams, context_tokens=now.context_tokens)
        return self.loop.budget.drain_s(beside, self.scheduler.step_tokens)

    def suppliers_of(self, sequence: KnownSequence) -> Sequence[Supplier]:
        return () if self.loads is None else (self.loads.for_sequences.supplier_of(sequence),)

    def serve(self, wanted: RequestedBlocks, *, is_from_cache: bool) -> PageJob:
        if is_from_cache:
            return CachedOnlyJob(self.pool, wanted, self.wake, None if self.loads is None else self.loads.for_others)
        return self.actions.begin(wanted)

    def gave(self, pages: int) -> None:
        self.use.served_pages += pages

    def pulled(self, pages: int) -> None:
        self.use.pulled_pages += pages
        self.feed.links_changed()

    def pulled_from_peer(self, request_id: RequestId) -> None:
        request = self._fleet.requests.get(request_id)
        if request is not None:
            request.peer_pages += 1

    # What the pool tells

    def stored(self, blocks: Sequence[BlockHash]) -> None:
        for block in blocks:
            self.log.stored(block)
            if self.tiers is not None:
                self.tiers.offload.saw(block)

    def removed(self, blocks: Sequence[BlockHash]) -> None:
        self.use.evicted_pages += len(blocks)
        for block in blocks:
            self.converter.forget(block)
            self.log.removed(block)

    def evicting(self, page: PageId, block: BlockHash, parent: BlockHash) -> None:
        if self.tiers is not None:
            self.tiers.offload.evicting(page, block, parent)

    def forgotten(self, block: BlockHash) -> None:
        """Does nothing: no simulated request ends in an error of the model, so no block is to be forgotten."""

    def new_writers(self, pages: Sequence[PageId]) -> None:
        """Does nothing. No page is ever read after it was reused, so there is no generation to count."""

    # What the loop tells

    def admitted(self, admission: AdmittedSequence) -> None:
        if self._new_proposer is not None and admission.sequence.proposer is None:
            admission.sequence.proposer = self._new_proposer()

    def most_steps(self, flight: Flight) -> int:
        """Returns how many steps may run before their tokens are sent: one where a first token is among them."""
        return 1 if self.decode_service is not None and self._times.has_first(flight) else flight.steps

    def preempted(self) -> None:
        self.use.preemptions += 1

    def ran(self, flight: Flight) -> None:
        seconds, use = flight.after(flight.steps), self.use
        use.busy_s += seconds
        use.prefill_s += seconds * flight.prompt_fraction
        use.steps += flight.steps
        use.prompt_tokens += flight.terms.prompt_tokens
        use.output_tokens += flight.tokens
        self.prefill_busy_s += seconds * flight.prompt_fraction
        if self.decode_service is not None:
            self._times.count(flight)

    # Death, and the end of a run

    def die(self) -> Sequence[SimulatedRequest]:
        """Ends the worker at once; peers notice later. Returns the requests that it owned."""
        done = self.loop.stop()
        if done is not None:
            self.ran(done)
        self.is_dead = True
        self.prefetch.stop()
        if self.loads is not None:
            self.loads.running.stop()
        if self.decode_service is not None:
            self.decode_service.end_streams()
        self.queue.after(self.shape.delays.detection_s, self.pulls.break_off)
        return [] if self.decode_service is None else self.decode_service.open_requests

    def check_quiet(self) -> None:
        """Asserts that nothing is held and no request waits."""
        pool = self.pool
        pool.check_integrity()
        assert not self.scheduler.running, f"{self.worker} still runs {self.scheduler.running} sequences"
        assert not self.scheduler.waiting, f"at {self.worker} {self.scheduler.waiting} sequences still wait"
        assert not len(self.pulls), f"{self.worker} still pulls, or serves pulls"
        held = pool.total - pool.unheld
        assert not held, f"{held} pages of {self.worker} are still held"


def _config(shape: FleetShape, worker: WorkerId, role: Role) -> WorkerConfig:
    schedule = ScheduleConfig(
        **SCHEDULE,
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
