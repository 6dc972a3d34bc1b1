"""The plain class behind a Ray actor or a process of its own: one life of one worker.

`__init__` is cheap, because a restarted actor reruns only that; servers and engine start in `run`.
"""

from __future__ import annotations

import abc
import asyncio
import logging
import os
from collections.abc import Sequence

from twostroke.config import WorkerConfig
from twostroke.errors import EngineLost, PeerLost
from twostroke.fault_points import Point, reach
from twostroke.ids import Epoch
from twostroke.rpc.v1 import control_pb2, control_pb2_grpc, worker_pb2_grpc
from twostroke.worker.bequest import bequeath
from twostroke.worker.control import ControlService
from twostroke.worker.host import ReadyInfo, WorkerHost
from twostroke.worker.loop import Role
from twostroke.worker.pages_service import PageJobs, PagesService
from twostroke.worker.plant import Plant

log = logging.getLogger(__name__)

CLOSE_LOST_S = 5.0
"""For what is closed after the engine is lost: whoever reads pages of a device that hangs never comes back."""


class RoleServices(Role, PageJobs, abc.ABC):
    """What a role adds to the host: how it answers the scheduler and pulls, and services of its own."""

    @abc.abstractmethod
    def register(self, host: WorkerHost) -> None:
        """Add the role's own services to the host's rpc server."""

    @property
    @abc.abstractmethod
    def open_requests(self) -> int:
        """What a drain waits for, besides open pulls."""

    @abc.abstractmethod
    def close(self) -> None:
        """End what the role has running; called when the rpc server no longer takes calls."""


class Worker(abc.ABC):
    def __init__(self, config: WorkerConfig, plant: Plant | None = None) -> None:
        """`plant` comes from an earlier life in this process."""
        self._config = config
        self.plant = plant
        """Once it is loaded. A flexible worker leaves it to the next life."""
        self._ready: asyncio.Future[ReadyInfo] | None = None
        self._host: WorkerHost | None = None
        self._pages: PagesService | None = None
        self._role: RoleServices | None = None
        self._stop = asyncio.Event()

    @abc.abstractmethod
    def mount(self, host: WorkerHost, tasks: asyncio.TaskGroup) -> RoleServices:
        """The role on this host; `tasks` end with the worker."""

    async def run(self, incarnation: int | None = None) -> None:
        """Load the model and serve until `shutdown`; once per object.

        Raises ConfigError for what cannot be started, and EngineLost where the process must end, and not wait for the
        engine's thread.
        """
        ready = self._ready_future()
        try:
            plant = self.plant = self.plant or await Plant.load(self._config)
            try:
                host = WorkerHost(self._config, Epoch.begin(incarnation or self._config.incarnation), plant)
                try:
                    await self._serve(host, ready)
                finally:
                    await _close(host)
            finally:
                if not self._config.flexible:
                    await plant.close()
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)
                ready.exception()  # whoever waits for it sees it; nobody has to
            if self._host is not None and self._host.gate.lost is not None:
                raise self._host.gate.lost from error  # whatever else went wrong then
            raise
        finally:
            ready.cancel()  # changes nothing unless `run` was cancelled while it started

    async def ready(self) -> ReadyInfo:
        """Where and as whom the worker serves, once it does. Raises what `run` raised."""
        return await asyncio.shield(self._ready_future())

    async def drain(self, deadline_s: float, heirs: Sequence[control_pb2.Heir] = ()) -> int:
        """Take no new work; wait up to `deadline_s` for what is open, then leave what is cached to the heirs. Returns
        how much was still open at the deadline."""
        if self._host is None or self._role is None or self._pages is None:
            raise PeerLost(f"{self._config.worker_id} is not serving")
        reach(Point.WORKER_DRAINING)
        until_s = asyncio.get_running_loop().time() + deadline_s
        self._host.gate.is_draining = True
        await self._host.rpc.set_serving(False)
        self._host.feed.publish()
        log.info("draining deadline_s=%.1f heirs=%d", deadline_s, len(heirs))
        try:
            async with asyncio.timeout_at(until_s):
                while self._open_work():
                    await self._host.progress.ticket().wait()
        except TimeoutError:
            return self._open_work()
        if heirs:
            await bequeath(self._host, heirs, until_s)
        return 0  # at most a lease of an heir is open, which has what it wanted

    async def shutdown(self) -> None:
        """Let `run` return."""
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
            self._host, self._role, self._pages = host, role, self._mount_services(host, role, tasks)
            await host.rpc.start()
            running = [
                tasks.create_task(self._work(host, role)),
                tasks.create_task(host.feed.beat()),
                tasks.create_task(_publish_progress(host)),
            ]
            await host.rpc.set_serving(True)
            info = host.ready_info(os.getpid())
            log.info("serving address=%s epoch=%s pages=%d", info.address, info.epoch, host.pool.total)
            if info.advice:
                log.warning("page pool is small advice=%r", info.advice)
            ready.set_result(info)
            try:
                await self._stop.wait()
                await host.rpc.stop(grace_s=0.5)  # what was told last goes out meanwhile
            finally:
                for task in running:
                    task.cancel()
                role.close()
                host.pulls.stop()
        if host.gate.lost is not None:
            raise host.gate.lost

    async def _work(self, host: WorkerHost, role: RoleServices) -> None:
        """Ends the epoch where the engine is lost: what is open here goes on elsewhere."""
        try:
            await host.loop.run(role)
        except EngineLost as error:
            log.critical("engine lost open=%d error=%s", self._open_work(), error.message)
            await host.lose_engine(error)
            role.lost(error)
            self._stop.set()

    def _mount_services(self, host: WorkerHost, role: RoleServices, tasks: asyncio.TaskGroup) -> PagesService:
        pages = PagesService(host, role, tasks)
        worker_pb2_grpc.add_PagesServicer_to_server(pages, host.rpc.server)
        control_pb2_grpc.add_ControlServicer_to_server(ControlService(host, self.drain), host.rpc.server)
        host.rpc.offer("twostroke.v1.Pages")
        host.rpc.offer("twostroke.v1.Control", waits_for_ready=False)
        role.register(host)
        return pages


async def _close(host: WorkerHost) -> None:
    try:
        async with asyncio.timeout(None if host.gate.lost is None else CLOSE_LOST_S):
            await host.close()
    except TimeoutError:
        log.error("not everything could be closed within %.1f s: the process ends without it", CLOSE_LOST_S)


async def _publish_progress(host: WorkerHost) -> None:
    """Tell routers of changed blocks after the step that changed them."""
    while True:
        ticket = host.progress.ticket()
        host.feed.publish_changes()
        await ticket.wait()
