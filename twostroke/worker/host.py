"""The parts of one life of a worker, put together: everything that both roles are made of."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import time
from dataclasses import dataclass

from twostroke import __version__
from twostroke.config import Role, WorkerConfig
from twostroke.errors import EngineLost
from twostroke.ids import Epoch, SessionId
from twostroke.kv_cache.memory import PageMemory
from twostroke.kv_cache.pool import PageState
from twostroke.rpc.membership import Membership
from twostroke.rpc.server import RpcServer
from twostroke.rpc.v1 import control_pb2
from twostroke.schedule.scheduler import Limits, Scheduler
from twostroke.telemetry import MetricsServer
from twostroke.tracing.setup import recorder_of
from twostroke.transfer.base import Endpoint, Identity
from twostroke.transfer.registry import default_names, open_transports
from twostroke.transfer.seal import seal_with
from twostroke.worker import calibration
from twostroke.worker.calibration import Reach, calibrate
from twostroke.worker.digests import PageDigests
from twostroke.worker.engine_check import EngineCheck, probe_batch
from twostroke.worker.events import EventFeed
from twostroke.worker.gate import Gate
from twostroke.worker.loop import WorkLoop
from twostroke.worker.metrics import WorkerMetrics
from twostroke.worker.news import News
from twostroke.worker.plant import Plant
from twostroke.worker.pull_client import PullClient, PullLimits

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadyInfo:
    """What the supervisor publishes of a worker that serves."""

    worker_id: str
    role: str
    address: str
    """host:port of its rpc server."""
    epoch: str
    fingerprint: str
    metrics_address: str
    pid: int
    advice: str = ""
    """What an operator should know (see LoadedModel); empty where there is nothing to say."""


class WorkerHost:
    """Owns transports and servers of one life, around its plant; `open` before use, `close` at the end."""

    def __init__(self, config: WorkerConfig, epoch: Epoch, plant: Plant) -> None:
        facts = plant.facts
        self._plant = plant
        self.config = config
        self.us = Membership.of(config.cluster_token, config.cluster_tls)
        self.epoch = epoch
        self.facts = facts
        self.memory = plant.memory
        self.metrics = WorkerMetrics(config.role, facts.block_size)
        self.metrics.expiries.watch("cluster", self.us.certificates)
        self.metrics.computes(plant.determinism)
        self.feed = EventFeed(plant.begin_life(epoch), config.patience.heartbeat_s)
        self.pool = plant.pool
        self.recorder = recorder_of(config.worker_id, config.role.value, config.tracing, self.metrics.registry)
        self.scheduler = Scheduler(
            self.pool,
            config.schedule,
            Limits(
                facts.block_size,
                facts.max_model_len,
                facts.eos_token_ids,
                align_chunks=config.role is Role.PREFILL,
                on_gpu=not isinstance(plant.memory, PageMemory),
            ),
        )
        self.gate = Gate(config.worker_id, epoch, facts.fingerprint, self.metrics)
        self.progress = News()
        self.engine = plant.engine
        probe = probe_batch(facts.block_size, self.pool.total, facts.max_model_len, samples=config.can_sample)
        self._check = EngineCheck(self.engine, probe, time.monotonic)
        self.loop = WorkLoop(
            self.scheduler,
            self.engine,
            self.metrics,
            self.progress,
            config.schedule.step_target_s,
            plant.rates,
            self._check,
        )
        self.metrics.watch(self.pool, self.scheduler, self.feed.log, lambda: self.loop.queued_s)
        names = config.runtime.transports or default_names(plant.memory)
        seal = seal_with(config.cluster_tls)
        self.transports = open_transports(names, config.host, config.patience.dead_after_s, seal, config.ports.pages)
        self.endpoints: list[Endpoint] = []
        self.digests = PageDigests(plant.memory)
        self.metrics.watch_pages(self.digests, self.transports)
        self.pulls = PullClient(
            self.gate,
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
        """Of the rpc server, as others are told."""
        self._metrics_server = MetricsServer(self.metrics.registry, config.host, config.ports.metrics)
        self._sessions = itertools.count(1)

    async def open(self) -> None:
        identity = Identity(self.config.worker_id, self.epoch, self.facts.fingerprint, self.config.cluster_token)
        for transport in self.transports:
            self.endpoints.append(await transport.open(self.memory, identity))
        await self._calibrate()
        await self._check.learn()

    async def close(self) -> None:
        """Servers first, so that nobody asks for what is being taken down."""
        await self.rpc.stop(grace_s=0.5)
        await self.pulls.close()
        for transport in self.transports:
            await transport.close()
        await self.digests.close()
        await self.engine.settle()
        await asyncio.to_thread(self._metrics_server.close)
        await asyncio.to_thread(self.recorder.close)

    def new_session(self) -> SessionId:
        return SessionId(next(self._sessions))

    async def lose_engine(self, error: EngineLost) -> None:
        """From here on nobody waits for the engine, and everybody who asks is told to go elsewhere."""
        self.gate.lost = error
        self.engine.give_up()
        await self.rpc.set_serving(False)
        self.feed.publish()

    @property
    def state(self) -> control_pb2.WorkerState:
        if self.gate.lost is not None:
            return control_pb2.WORKER_STATE_DEAD
        if self.gate.is_draining:
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
        )

    def model_info(self) -> control_pb2.ModelInfo:
        facts = self.facts
        return control_pb2.ModelInfo(
            model=self.config.model.public_name,
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            eos_token_ids=facts.eos_token_ids,
            dtype=facts.dtype,
            block_size=facts.block_size,
            page_bytes=facts.page_bytes,
            pool_pages=facts.pages,
        )

    def load_report(self) -> control_pb2.Load:
        rates, cost = self.loop.rates, self.loop.rates.cost
        links = self.pulls.links.known(asyncio.get_running_loop().time())
        return control_pb2.Load(
            running=self.scheduler.running,
            waiting=self.scheduler.waiting,
            seats=self.config.schedule.max_num_seqs,
            queued_tokens=self.scheduler.queued_tokens,
            pages_total=self.pool.total,
            pages_free=self.pool.count(PageState.FREE),
            pages_cached=self.pool.count(PageState.CACHED),
            pages_arriving=self.pool.count(PageState.ARRIVING),
            pages_active=self.pool.count(PageState.ACTIVE),
            pages_quarantined=self.pool.count(PageState.QUARANTINED),
            seconds_per_token=rates.seconds_per_token,
            seconds_per_step=rates.seconds_per_step,
            state=self.state,
            queued_s=self.loop.queued_s,
            prefill_busy_s=self.loop.prefill_busy_s,
            costs=control_pb2.StepCosts(
                **dataclasses.asdict(cost),
                step_tokens=self.scheduler.step_tokens,
                step_target_s=self.config.schedule.step_target_s,
            ),
            links=[
                control_pb2.LinkRate(worker_id=peer, latency_s=link.latency_s, bytes_per_s=link.bytes_per_s)
                for peer, link in links.items()
            ],
        )

    async def _calibrate(self) -> None:
        """Nobody is served before what that costs is known; what an earlier life has learned still holds."""
        if self._plant.is_calibrated:
            return
        reach = Reach(
            step_tokens=self.scheduler.step_tokens,
            max_model_len=self.facts.max_model_len,
            max_sequences=self.config.schedule.max_num_seqs,
            pages=self.pool.total,
            block_size=self.facts.block_size,
            samples=self.config.can_sample,
        )
        effort = calibration.PACED if self.config.model.is_paced else calibration.COMPUTED
        started_s = time.monotonic()
        await calibrate(self.engine, self.loop.rates, reach, effort)
        self._plant.is_calibrated = True
        log.info("calibrated seconds=%.3f %s", time.monotonic() - started_s, self.loop.rates.cost)
