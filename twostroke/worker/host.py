"""The worker host puts together the parts of one epoch of a worker that both roles share."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from twostroke import __version__
from twostroke.base.errors import EngineLost
from twostroke.base.ids import Epoch, SessionId
from twostroke.config import WorkerConfig
from twostroke.kv_cache.groups.group_pool import GroupPool
from twostroke.kv_cache.groups.page_state import PageState
from twostroke.observability.telemetry import MetricsServer
from twostroke.rpc.clock import machine_name
from twostroke.rpc.membership import Membership
from twostroke.rpc.server import RpcServer
from twostroke.rpc.v1 import control_pb2
from twostroke.scheduler.cost import Queued
from twostroke.tracing.recorder import recorder_of
from twostroke.transfer.base import Identity, PageEndpoint, PageTransport
from twostroke.transfer.registry import default_names, open_transports
from twostroke.transfer.sockets.tls import wrapper_for
from twostroke.worker.branches import Branches, BranchTable
from twostroke.worker.engine_state import EngineState
from twostroke.worker.event_feed import EventFeed
from twostroke.worker.metrics import WorkerMetrics
from twostroke.worker.pull_ends import DirectLanding, PageDigests
from twostroke.worker.pulls.pull_client import PullClient, PullLimits
from twostroke.worker.request_validator import RequestValidator
from twostroke.worker.steps.engine_steps import EngineSteps

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
    """Tokens that fit into its page pool, which takes `pool_bytes`."""


class WorkerHost:
    """Owns transports and servers of one epoch of a worker. Call `open` before use and `close` at the end."""

    def __init__(self, config: WorkerConfig, epoch: Epoch, engine_state: EngineState, table: BranchTable) -> None:
        facts = engine_state.facts
        self.engine_state = engine_state
        self.config = config
        self.us = Membership.of(config.cluster_token, config.cluster_tls)
        self.epoch = epoch
        self.facts = facts
        self.determinism = engine_state.determinism
        self.memory = engine_state.memory
        self.pool = engine_state.pool
        self.engine = engine_state.engine
        self.metrics = _metrics_of(config, engine_state, self.us)
        self.feed = EventFeed(engine_state.begin_epoch(epoch), config.patience.heartbeat_s)
        self.recorder = recorder_of(config.worker_id, config.role.value, config.tracing, self.metrics.registry)
        self.validator = RequestValidator(
            config.worker_id, epoch, facts.fingerprint, self.metrics, kv_form=str(facts.kv_form)
        )
        self._sessions = itertools.count(1)
        self.branches = Branches.of(table, self)
        self.steps = EngineSteps(config, engine_state, self.metrics, self.branches)
        self.scheduler, self.loop, self.progress = self.steps.scheduler, self.steps.loop, self.steps.progress
        names, silence_s = config.runtime.transports or default_names(self.memory), config.patience.dead_after_s
        wrapper = wrapper_for(config.cluster_tls)
        self.transports: list[PageTransport] = open_transports(
            names, config.host, silence_s, wrapper, config.ports.pages
        )
        self.endpoints: list[PageEndpoint] = []
        """How other workers reach the pages, best first; filled by `open`."""
        self.digests = PageDigests(self.memory)
        self.pulls = PullClient(
            self.validator,
            self.pool,
            DirectLanding(self.digests, self.transports, self.memory.pages),
            self.metrics,
            converting=self.branches.landing,
            us=self.us,
            limits=PullLimits(copy_s=config.pull_timeout_s, silence_s=silence_s),
            wake=self.loop.wake,
        )
        self.rpc = RpcServer(
            config.host, config.ports.rpc, token=config.cluster_token or None, certificates=self.us.certificates
        )
        self.address = self.rpc.address
        """Address of the rpc server, as others see it."""
        self._watch()
        self._metrics_server = MetricsServer(self.metrics.registry, config.host, config.ports.metrics)

    async def open(self) -> None:
        """Lets other workers read pages. Then it measures what a step costs, and runs the engine's probe."""
        identity = Identity(self.config.worker_id, self.epoch, self.facts.page_identity, self.config.cluster_token)
        for transport in self.transports:
            self.endpoints.append(await transport.open(self.memory, identity))
        for branch in self.branches.each:
            await branch.open(identity)
        await self.steps.prepare()

    async def close(self) -> None:
        """Closes everything, servers first."""
        await self.rpc.stop(grace_s=0.5)
        for branch in self.branches.each:
            branch.stop()
            await branch.close()
        await self.pulls.close()
        for transport in self.transports:
            await transport.close()
        for branch in self.branches.each:
            await branch.shut()
        await self.digests.close()
        await self.engine.wait_idle()
        await asyncio.to_thread(self._metrics_server.close)
        await asyncio.to_thread(self.recorder.close)

    def compute_s(self, queued: Queued) -> float:
        """Returns the seconds of computing prompts here beside the current streams."""
        now = self.scheduler.load.queued()
        beside = dataclasses.replace(queued, streams=now.streams, context_tokens=now.context_tokens)
        return self.loop.drain_s(beside)

    def wake(self) -> None:
        """Wakes the work loop."""
        self.loop.wake()

    def _watch(self) -> None:
        """Reports all parts at every scrape."""
        self.metrics.watch(self.pool, self.scheduler, self.feed.log)
        served = self.branches.served
        others = () if served is None else served.transports
        self.metrics.watch_pages(self.digests, self.transports, others)

    def new_session(self) -> SessionId:
        return SessionId(next(self._sessions))

    async def lose_engine(self, error: EngineLost) -> None:
        """Stops waiting for the engine, and refuses all calls from here on."""
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
                for use in self.engine_state.memory_use
            ],
            kv_form=str(self.facts.kv_form),
        )

    def _kernels_info(self) -> control_pb2.KernelsInfo | None:
        kernels = self.engine_state.kernels
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
            tail_blocks=sum(group.tail_blocks for group in self.pool.others),
            further_page_bytes=sum(facts.layout.page_sizes[1:]),
        )

    def load_report(self) -> control_pb2.Load:
        rates, cost = self.loop.rates, self.loop.rates.cost
        links = self.pulls.links.known(asyncio.get_running_loop().time())
        queued = self.scheduler.load.queued()
        load = control_pb2.Load(
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
            further=_further_report(self.pool.others),
            stream_step=control_pb2.StreamStep(**dataclasses.asdict(self.loop.stream_steps.each)),
        )
        for branch in self.branches.each:
            branch.add_to_load(load)
        return load


def _further_report(groups: Sequence[GroupPool]) -> control_pb2.PageCounts | None:
    if not groups:
        return None
    (group,) = groups
    return control_pb2.PageCounts(total=group.total, **{state.value: group.count(state) for state in PageState})


def _metrics_of(config: WorkerConfig, engine_state: EngineState, us: Membership) -> WorkerMetrics:
    metrics = WorkerMetrics(config.role, engine_state.facts.block_size)
    metrics.expiries.watch("cluster", us.certificates)
    metrics.computes(engine_state.determinism)
    metrics.computes_with(engine_state.kernels)
    metrics.uses_memory(engine_state.memory_use)
    metrics.watch_experts(engine_state.expert_load)
    return metrics
