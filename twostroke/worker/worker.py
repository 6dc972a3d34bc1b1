"""BaseWorker runs one epoch of one worker, in a Ray actor or in a process of its own.

`__init__` is cheap, because a restarted actor reruns only that; servers and engine start in `run`.
"""

from __future__ import annotations

import abc
import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import ClassVar

from twostroke.base.errors import EngineLost, PeerLost
from twostroke.base.fault_points import Point, reach
from twostroke.base.ids import Epoch
from twostroke.config import WorkerConfig
from twostroke.rpc.v1 import control_pb2, control_pb2_grpc, worker_pb2_grpc
from twostroke.worker.branches import BranchTable
from twostroke.worker.engine_state import EngineState
from twostroke.worker.host import ReadyInfo, WorkerHost
from twostroke.worker.role_host import RoleHandlers
from twostroke.worker.services.cache_handoff import hand_off_cache
from twostroke.worker.services.control import WorkerControlService
from twostroke.worker.services.pages_service import PageJobs, PagesService

log = logging.getLogger(__name__)

CLOSE_LOST_S = 5.0
"""Seconds for closing after the engine is lost: a thread that reads pages of a hung device never returns."""


class RoleServices(RoleHandlers, PageJobs, abc.ABC):
    """A role handles events of the work loop and serves pulls."""

    @property
    @abc.abstractmethod
    def open_requests(self) -> int:
        """Number of requests that a drain waits for, besides open pulls."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the role's open work; called when the rpc server no longer takes calls."""


class BaseWorker(abc.ABC):
    BRANCHES: ClassVar[BranchTable]
    """The optional features of the role, each in a folder of its own."""

    def __init__(
        self, config: WorkerConfig, engine_state: EngineState | None = None, branches: BranchTable | None = None
    ) -> None:
        """`engine_state` comes from an earlier epoch in this process. `branches` replaces the table of the role."""
        self._config = config
        self._table = self.BRANCHES if branches is None else branches
        self.engine_state = engine_state
        """The engine state. None until it is loaded. A worker that can switch roles keeps it for the next epoch."""
        self._ready: asyncio.Future[ReadyInfo] | None = None
        self._host: WorkerHost | None = None
        self._pages: PagesService | None = None
        self._role: RoleServices | None = None
        self._stop = asyncio.Event()

    @abc.abstractmethod
    def mount(self, host: WorkerHost, tasks: asyncio.TaskGroup) -> RoleServices:
        """Creates the role on this host, and adds its own rpc services; `tasks` end with the worker."""

    async def run(self, incarnation: int | None = None) -> None:
        """Loads the model and serves until `shutdown`; called once per object.

        Raises ConfigError for what cannot be started, and EngineLost where the process must end without waiting for
        the engine's thread.
        """
        ready = self._ready_future()
        try:
            engine_state = self.engine_state = self.engine_state or await EngineState.load(
                self._config, {branch: branch.load for branch in self._table}
            )
            try:
                epoch = Epoch.begin(incarnation or self._config.incarnation)
                host = WorkerHost(self._config, epoch, engine_state, self._table)
                try:
                    await self._serve(host, ready)
                finally:
                    await _close(host)
            finally:
                if not self._config.flexible:
                    await engine_state.close()
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)
                ready.exception()  # retrieved, so that asyncio does not report it
            if self._host is not None and self._host.validator.lost is not None:
                raise self._host.validator.lost from error  # other errors are its consequences
            raise
        finally:
            ready.cancel()  # changes nothing unless `run` was cancelled while it started

    async def ready(self) -> ReadyInfo:
        """Waits until the worker serves, and returns its addresses and epoch. Raises what `run` raised."""
        return await asyncio.shield(self._ready_future())

    async def drain(self, deadline_s: float, successors: Sequence[control_pb2.Successor] = ()) -> int:
        """Takes no new work, waits up to `deadline_s` for open work, then hands the cache to the successors.

        Returns how much was still open at the deadline.
        """
        if self._host is None or self._role is None or self._pages is None:
            raise PeerLost(f"{self._config.worker_id} is not serving")
        reach(Point.WORKER_DRAINING)
        until_s = asyncio.get_running_loop().time() + deadline_s
        self._host.validator.is_draining = True
        for branch in self._host.branches.each:
            branch.draining()
        await self._host.rpc.set_serving(False)
        self._host.feed.publish()
        log.info("draining deadline_s=%.1f successors=%d", deadline_s, len(successors))
        try:
            async with asyncio.timeout_at(until_s):
                while self._open_work():
                    await self._host.progress.ticket().wait()
        except TimeoutError:
            return self._open_work()
        if successors:
            await hand_off_cache(self._host, successors, until_s)
        return 0  # at most a successor's pull is open, and it has its pages

    async def shutdown(self) -> None:
        """Lets `run` return."""
        self._stop.set()

    def _open_work(self) -> int:
        assert self._role is not None
        assert self._pages is not None
        return self._role.open_requests + self._pages.open

    def _ready_future(self) -> asyncio.Future[ReadyInfo]:
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
        return self._ready

    async def _serve(self, host: WorkerHost, ready: asyncio.Future[ReadyInfo]) -> None:
        await host.open()
        async with asyncio.TaskGroup() as tasks:
            role = self.mount(host, tasks)
            self._host, self._role = host, role
            self._pages = self._mount_services(host, role, tasks)
            await host.rpc.start()
            handlers = host.branches.handlers(role)
            running = [
                tasks.create_task(self._until_lost(host, role, partial(host.loop.run, handlers, host.branches))),
                tasks.create_task(self._watch_engine(host, role)),
                tasks.create_task(host.feed.beat()),
                tasks.create_task(host.feed.publish_progress(host.progress)),
            ]
            for branch in host.branches.each:
                running += [tasks.create_task(self._until_lost(host, role, work)) for work in branch.watching(handlers)]
            await host.rpc.set_serving(True)
            info = host.ready_info(os.getpid())
            log.info("serving address=%s epoch=%s pages=%d", info.address, info.epoch, host.pool.total)
            if info.advice:
                log.warning("page pool is small advice=%r", info.advice)
            ready.set_result(info)
            try:
                await self._stop.wait()
                await host.rpc.stop(grace_s=0.5)  # the last messages are sent meanwhile
            finally:
                for task in running:
                    task.cancel()
                for branch in host.branches.each:
                    branch.draining()
                role.close()
                host.pulls.stop()
                for branch in host.branches.each:
                    branch.stop()
        if host.validator.lost is not None:
            raise host.validator.lost

    async def _until_lost(self, host: WorkerHost, role: RoleServices, work: Callable[[], Awaitable[object]]) -> None:
        """Runs work that uses the engine. If the engine is lost, the epoch ends; requests continue on other workers."""
        try:
            await work()
        except EngineLost as error:
            await self._end_lost(host, role, error)

    async def _watch_engine(self, host: WorkerHost, role: RoleServices) -> None:
        """Notices a lost engine also while no step runs."""
        assert self.engine_state is not None
        if self.engine_state.lost is not None:
            lost = asyncio.shield(asyncio.wrap_future(self.engine_state.lost))
            await self._end_lost(host, role, await lost)

    async def _end_lost(self, host: WorkerHost, role: RoleServices, error: EngineLost) -> None:
        if host.validator.lost is not None:
            return
        log.critical("engine lost open=%d error=%s", self._open_work(), error.message)
        await host.lose_engine(error)
        role.lost(error)
        self._stop.set()

    def _mount_services(self, host: WorkerHost, role: RoleServices, tasks: asyncio.TaskGroup) -> PagesService:
        pages = PagesService(host, role, tasks)
        worker_pb2_grpc.add_PagesServicer_to_server(pages, host.rpc.server)
        control_pb2_grpc.add_ControlServicer_to_server(WorkerControlService(host, self.drain), host.rpc.server)
        host.rpc.offer("twostroke.v1.Pages")
        host.rpc.offer("twostroke.v1.Control", waits_for_ready=False)
        for branch in host.branches.each:
            branch.serve(host.rpc, tasks)
        return pages


async def _close(host: WorkerHost) -> None:
    try:
        async with asyncio.timeout(None if host.validator.lost is None else CLOSE_LOST_S):
            await host.close()
    except TimeoutError:
        log.error("close timed out seconds=%.1f", CLOSE_LOST_S)
