"""The worker host puts together the parts of one epoch of a worker that both roles share."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import AsyncIterator, Generator, Sequence
from dataclasses import dataclass

from twostroke import __version__
from twostroke.config import Role, WorkerConfig
from twostroke.errors import EngineLost
from twostroke.ids import Epoch, SessionId
from twostroke.kv_cache.events import EventBatch, EventLog, parts_of
from twostroke.kv_cache.form import FORMS
from twostroke.kv_cache.memory import PageMemory
from twostroke.kv_cache.pool import PageState
from twostroke.kv_cache.tier import Tier
from twostroke.profiler import WORK_LOOP, Profiler
from twostroke.rpc.clock import machine_name
from twostroke.rpc.events import tier_to_message
from twostroke.rpc.membership import Membership
from twostroke.rpc.server import RpcServer
from twostroke.rpc.v1 import control_pb2
from twostroke.scheduler.batching import BatchBuilder, Chunk, Step, StepBuilder
from twostroke.scheduler.cost import Queued
from twostroke.scheduler.scheduler import ClaimGate, Scheduler, SchedulerLimits
from twostroke.scheduler.step_target import USUAL_S, StepTarget
from twostroke.telemetry import MetricsServer
from twostroke.tracing.setup import recorder_of
from twostroke.transfer.base import Identity, PageEndpoint, PageTransport
from twostroke.transfer.registry import HOST_NAMES, default_names, open_transports
from twostroke.transfer.sockets.tls import SocketWrapper, wrapper_for
from twostroke.worker.condition import Condition
from twostroke.worker.engine_state import EngineState
from twostroke.worker.metrics import WorkerMetrics
from twostroke.worker.pulls.converted_pages import ConvertedPages
from twostroke.worker.pulls.digests import PageDigests
from twostroke.worker.pulls.pull_client import PullClient, PullLimits
from twostroke.worker.request_validator import RequestValidator
from twostroke.worker.steps import calibration
from twostroke.worker.steps.calibration import CalibrationLimits, calibrate, step_tokens_within
from twostroke.worker.steps.engine_check import EngineCheck, probe_batch
from twostroke.worker.steps.sharing import Sharing
from twostroke.worker.steps.work_loop import WorkLoop
from twostroke.worker.tiers.eviction_copies import EvictionCopies
from twostroke.worker.tiers.loads import TierLoads
from twostroke.worker.tiers.metrics import TierUse
from twostroke.worker.tiers.prefetch import Prefetch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadyInfo:
    """Facts about a serving worker that the supervisor publishes."""

    worker_id: str
    role: str
    address: str
    """host:port of its rpc server."""
    epoch: str
    fingerprint: str
    metrics_address: str
    pid: int
    advice: str = ""
    """Advice to the operator (see LoadedModel), or empty."""
    pool_bytes: int = 0
    pool_tokens: int = 0
    """What its page pool takes, and how many tokens fit into it."""


class WorkerHost:
    """Owns transports and servers of one epoch, around its engine state; `open` before use, `close` at the end."""

    def __init__(self, config: WorkerConfig, epoch: Epoch, engine_state: EngineState) -> None:
        facts = engine_state.facts
        self._engine_state = engine_state
        self.config = config
        self.us = Membership.of(config.cluster_token, config.cluster_tls)
        self.epoch = epoch
        self.facts = facts
        self.memory = engine_state.memory
        self.metrics = _metrics_of(config, engine_state, self.us)
        self.feed = EventFeed(engine_state.begin_epoch(epoch), config.patience.heartbeat_s)
        self.pool = engine_state.pool
        self.recorder = recorder_of(config.worker_id, config.role.value, config.tracing, self.metrics.registry)
        self.eviction_copies = EvictionCopies(engine_state.tiers, self.pool, self.memory, self._wake)
        self.scheduler = _scheduler_of(config, engine_state, self.eviction_copies)
        self.validator = RequestValidator(
            config.worker_id, epoch, facts.fingerprint, self.metrics, kv_form=str(facts.kv_form)
        )
        self.progress = Condition()
        self.engine = engine_state.engine
        self._check = _check_of(config, engine_state)
        self.loop = WorkLoop(
            self.scheduler,
            self.engine,
            self.metrics,
            self.progress,
            _sharing_of(config, engine_state, self.scheduler),
            engine_state.rates,
            self._check,
            engine_state.engine.profiler,
        )
        self.tiers = engine_state.tiers
        self.tiers.report_to(self.metrics.of_tiers())
        self.loads = self._tier_loads()
        self.prefetch = Prefetch(
            self.tiers,
            self.pool,
            self.loads,
            self.facts.block_size,
            compute_s=self._compute_s,
            wake=self.loop.wake,
        )
        self.metrics.watch(self.pool, self.scheduler, self.feed.log, lambda: self.loop.queued_s)
        wrapper = wrapper_for(config.cluster_tls)
        self.transports = _transports_of(config, engine_state, wrapper)
        self.endpoints: list[PageEndpoint] = []
        self.converted = _converted_of(config, engine_state, wrapper)
        self.digests = PageDigests(engine_state.memory)
        self.metrics.watch_pages(self.digests, self.transports, self.converted)
        self.pulls = PullClient(
            self.validator,
            self.pool,
            self.digests,
            self.transports,
            self.metrics,
            us=self.us,
            limits=PullLimits(copy_s=config.pull_timeout_s, silence_s=config.patience.dead_after_s),
            wake=self.loop.wake,
        )
        self.rpc = RpcServer(
            config.host, config.ports.rpc, token=config.cluster_token or None, certificates=self.us.certificates
        )
        self.address = self.rpc.address
        """Address of the rpc server, as others see it."""
        self._metrics_server = MetricsServer(self.metrics.registry, config.host, config.ports.metrics)
        self._sessions = itertools.count(1)

    async def open(self) -> None:
        identity = Identity(self.config.worker_id, self.epoch, self.facts.page_identity, self.config.cluster_token)
        for transport in self.transports:
            self.endpoints.append(await transport.open(self.memory, identity))
        if self.converted is not None:
            await self.converted.open(dataclasses.replace(identity, fingerprint=self.facts.converted_identity))
        await self._calibrate()
        if self._chooses_step_tokens:
            self.scheduler.step_tokens = step_tokens_within(self.loop.rates.cost, self.scheduler.step_tokens)
        await self._check.learn()

    async def close(self) -> None:
        """Close everything, servers first."""
        await self.rpc.stop(grace_s=0.5)
        await self.pulls.close()
        self.prefetch.stop()
        self.loads.stop()
        self.eviction_copies.stop()
        await self.tiers.wait_idle()
        for transport in self.transports:
            await transport.close()
        if self.converted is not None:
            await self.converted.close()
        await self.digests.close()
        await self.engine.wait_idle()
        await asyncio.to_thread(self._metrics_server.close)
        await asyncio.to_thread(self.recorder.close)

    def _tier_loads(self) -> TierLoads:
        return TierLoads(
            self.tiers,
            self.pool,
            self.facts.block_size,
            new_session=self.new_session,
            compute_s=self._compute_s,
            wake=self.loop.wake,
        )

    def _wake(self) -> None:
        self.loop.wake()

    def new_session(self) -> SessionId:
        return SessionId(next(self._sessions))

    def _compute_s(self, queued: Queued) -> float:
        """Return the time of computing prompts here beside the streams of now."""
        now = self.scheduler.queued()
        beside = dataclasses.replace(queued, streams=now.streams, context_tokens=now.context_tokens)
        return self.loop.drain_s(beside)

    async def lose_engine(self, error: EngineLost) -> None:
        """Stop waiting for the engine, and refuse all calls from here on."""
        self.validator.lost = error
        self.engine.give_up()
        await self.rpc.set_serving(False)
        self.feed.publish()

    @property
    def state(self) -> control_pb2.WorkerState:
        if self.validator.lost is not None:
            return control_pb2.WORKER_STATE_DEAD
        if self.validator.is_draining:
            return control_pb2.WORKER_STATE_DRAINING
        return control_pb2.WORKER_STATE_SERVING

    def ready_info(self, pid: int) -> ReadyInfo:
        return ReadyInfo(
            worker_id=self.config.worker_id,
            role=self.config.role.value,
            address=self.address,
            epoch=str(self.epoch),
            fingerprint=self.facts.fingerprint,
            metrics_address=self._metrics_server.address,
            pid=pid,
            advice=self.facts.advice,
            pool_bytes=self.facts.pages * self.facts.page_bytes,
            pool_tokens=self.facts.pages * self.facts.block_size,
        )

    def server_info(self) -> control_pb2.ServerInfo:
        return control_pb2.ServerInfo(
            server_id=self.config.worker_id,
            role=self.config.role.value,
            epoch=str(self.epoch),
            fingerprint=self.facts.fingerprint,
            version=__version__,
            state=self.state,
            metrics_address=self._metrics_server.address,
            clock_ns=time.monotonic_ns(),
            machine=machine_name(),
            kernels=self._kernels_info(),
            memory=[
                control_pb2.MemoryUse(
                    part=use.part, billed_bytes=use.billed_bytes, measured_bytes=use.measured_bytes or 0
                )
                for use in self._engine_state.memory_use
            ],
            kv_form=str(self.facts.kv_form),
        )

    def _kernels_info(self) -> control_pb2.KernelsInfo | None:
        kernels = self._engine_state.kernels
        return None if kernels is None else control_pb2.KernelsInfo(**dataclasses.asdict(kernels))

    def model_info(self) -> control_pb2.ModelInfo:
        facts = self.facts
        return control_pb2.ModelInfo(
            model=self.config.model.public_name,
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            eos_token_ids=facts.eos_token_ids,
            dtype=facts.dtype,
            kv_format=facts.kv_form.format,
            kv_converted_from=facts.kv_form.converted_from or "",
            block_size=facts.block_size,
            page_bytes=facts.page_bytes,
            pool_pages=facts.pages,
        )

    def load_report(self) -> control_pb2.Load:
        rates, cost = self.loop.rates, self.loop.rates.cost
        links = self.pulls.links.known(asyncio.get_running_loop().time())
        queued = self.scheduler.queued()
        return control_pb2.Load(
            running=self.scheduler.running,
            waiting=self.scheduler.waiting,
            slots=self.config.schedule.max_num_seqs,
            max_waiting=self.config.schedule.max_waiting,
            queued_tokens=queued.all_tokens,
            queried_tokens=self.metrics.queried_tokens,
            hit_tokens=self.metrics.hit_tokens,
            pages_total=self.pool.total,
            pages_free=self.pool.count(PageState.FREE),
            pages_cached=self.pool.count(PageState.CACHED),
            pages_arriving=self.pool.count(PageState.ARRIVING),
            pages_active=self.pool.count(PageState.ACTIVE),
            pages_quarantined=self.pool.count(PageState.QUARANTINED),
            pages_pinned=self.pool.count(PageState.PINNED),
            seconds_per_token=rates.seconds_per_token,
            seconds_per_step=rates.seconds_per_step,
            state=self.state,
            queued_s=self.loop.drain_s(queued),
            prefill_busy_s=self.loop.prefill_busy_s,
            costs=control_pb2.StepCosts(
                **dataclasses.asdict(cost),
                step_tokens=self.scheduler.step_tokens,
                step_target_s=self.loop.budget.step_s(queued.streams, queued.context_tokens),
            ),
            links=[
                control_pb2.LinkRate(worker_id=peer, latency_s=link.latency_s, bytes_per_s=link.bytes_per_s)
                for peer, link in links.items()
            ],
            tiers=[_tier_report(tier, use) for tier, use in self.tiers.uses().items() if use.is_up],
            conversion_page_s=self.converted.page_s if self.converted is not None else 0.0,
        )

    @property
    def _chooses_step_tokens(self) -> bool:
        """Nobody said how many tokens a step may have, and cores compute it: their speed differs by machine."""
        is_given = self.config.schedule.max_num_batched_tokens is not None
        return not is_given and _computes_on_cores(self.config, self._engine_state)

    async def _calibrate(self) -> None:
        """Measure step costs before serving, unless an earlier epoch of this process has."""
        if self._engine_state.is_calibrated:
            return
        step_limits = CalibrationLimits(
            step_tokens=self.scheduler.step_tokens,
            max_model_len=self.facts.max_model_len,
            max_sequences=self.config.schedule.max_num_seqs,
            pages=self.pool.total,
            block_size=self.facts.block_size,
            runs_decode=self.config.can_sample,
        )
        budget = calibration.PACED_BUDGET if self.config.model.is_paced else calibration.COMPUTED_BUDGET
        started_s = time.monotonic()
        with contextlib.ExitStack() as turn:
            if self._engine_state.neighbours is not None:
                await asyncio.to_thread(turn.enter_context, self._engine_state.neighbours.measuring())
            await calibrate(self.engine, self.loop.rates, step_limits, budget)
        self._engine_state.is_calibrated = True
        log.info("calibrated seconds=%.3f %s", time.monotonic() - started_s, self.loop.rates.cost)


def _transports_of(config: WorkerConfig, engine_state: EngineState, wrapper: SocketWrapper) -> list[PageTransport]:
    names = config.runtime.transports or default_names(engine_state.memory)
    return open_transports(names, config.host, config.patience.dead_after_s, wrapper, config.ports.pages)


def _converted_of(config: WorkerConfig, engine_state: EngineState, wrapper: SocketWrapper) -> ConvertedPages | None:
    """Return what converts pages for the other role, where that one has another form."""
    conversion = engine_state.facts.conversion
    if conversion is None:
        return None
    names = [name for name in config.runtime.transports or HOST_NAMES if name != "cuda_ipc"]  # they lie in host memory
    transports = open_transports(names, config.host, config.patience.dead_after_s, wrapper, config.ports.converted)
    return ConvertedPages(engine_state.memory, conversion, transports)


def _tier_report(tier: Tier, use: TierUse) -> control_pb2.TierRate:
    return control_pb2.TierRate(
        tier=tier_to_message(tier),
        page_s=use.page_s,
        blocks=use.blocks,
        used_bytes=use.used_bytes,
        capacity_bytes=use.most_bytes,
    )


def _metrics_of(config: WorkerConfig, engine_state: EngineState, us: Membership) -> WorkerMetrics:
    metrics = WorkerMetrics(config.role, engine_state.facts.block_size)
    metrics.expiries.watch("cluster", us.certificates)
    metrics.computes(engine_state.determinism)
    metrics.computes_with(engine_state.kernels)
    metrics.takes(engine_state.memory_use)
    return metrics


def _check_of(config: WorkerConfig, engine_state: EngineState) -> EngineCheck:
    facts, total = engine_state.facts, engine_state.pool.total
    probe = probe_batch(facts.block_size, total, facts.max_model_len, samples=config.can_sample)
    return EngineCheck(engine_state.engine, probe, time.monotonic)


def _scheduler_of(config: WorkerConfig, engine_state: EngineState, gate: ClaimGate) -> Scheduler:
    facts = engine_state.facts
    limits = SchedulerLimits(
        facts.block_size,
        facts.max_model_len,
        facts.eos_token_ids,
        align_chunks=config.role is Role.PREFILL,
        on_gpu=_is_on_gpu(engine_state),
        has_exact_blocks=not config.model.is_paced and FORMS[config.kv_format].spans_block,
    )
    builder = BatchBuilder(limits.block_size, engine_state.pool.total, limits.eos_token_ids)
    profiled = ProfiledBuilder(builder, engine_state.engine.profiler)
    return Scheduler(engine_state.pool, config.schedule, limits, profiled, gate)


def _is_on_gpu(engine_state: EngineState) -> bool:
    return not isinstance(engine_state.memory, PageMemory)


def _computes_on_cores(config: WorkerConfig, engine_state: EngineState) -> bool:
    return not _is_on_gpu(engine_state) and not config.model.is_paced


def _step_target_of(config: WorkerConfig, engine_state: EngineState) -> StepTarget:
    """Cores are shared, and their costs differ from machine to machine; a device of its own keeps to the usual."""
    usual_s = None if _computes_on_cores(config, engine_state) else USUAL_S
    return StepTarget(config.schedule.step_target_s, config.slo_itl_s, usual_s)


def _sharing_of(config: WorkerConfig, engine_state: EngineState, scheduler: Scheduler) -> Sharing:
    target = _step_target_of(config, engine_state)
    return Sharing(scheduler, engine_state.rates, target, _loop_time_s, engine_state.neighbours)


def _loop_time_s() -> float:
    return asyncio.get_running_loop().time()


@dataclass(frozen=True, slots=True)
class ProfiledBuilder:
    """Shows the part of planning that builds the batch to whoever profiles."""

    builder: StepBuilder
    profiler: Profiler

    def build(self, chunks: Sequence[Chunk]) -> Step:
        with self.profiler.slice(WORK_LOOP, "build batch"):
            return self.builder.build(chunks)


class EventFeed:
    """The worker's event log as routers follow it: batches in order, or a snapshot first."""

    def __init__(self, log: EventLog, heartbeat_s: float) -> None:
        self.log = log
        self._heartbeat_s = heartbeat_s
        self._published = Condition()

    def publish(self) -> None:
        self.log.publish(time.time())
        self._published.notify()

    def publish_changes(self) -> None:
        if self.log.has_changes:
            self.publish()

    async def beat(self) -> None:
        """Publish a batch at least every `heartbeat_s`, even an empty one."""
        while True:
            ticket = self._published.ticket()
            try:
                async with asyncio.timeout(self._heartbeat_s):
                    await ticket.wait()
            except TimeoutError:
                self.publish()

    async def follow(self, epoch: str, start_sequence: int) -> AsyncIterator[EventBatch]:
        """Yield batches from `start_sequence` of `epoch` on, after a snapshot if the log does not reach back.

        Long ones come in parts, so that nobody waits long for the event loop.
        """
        known = epoch == str(self.log.epoch)
        batches = self.log.since(start_sequence) if known else None
        while True:
            if batches is None:
                self.publish_changes()
            ticket = self._published.ticket()
            with contextlib.closing(self._parts(batches)) as parts:
                for part in parts:
                    yield part
                    start_sequence = part.sequence + 1
            if self.log.sequence < start_sequence:
                await ticket.wait()
            batches = self.log.since(start_sequence)

    def _parts(self, batches: Sequence[EventBatch] | None) -> Generator[EventBatch]:
        """Yield these batches, or a snapshot, in parts."""
        if batches is None:
            yield from self.log.snapshot_parts()
            return
        for batch in batches:
            yield from parts_of(batch)
