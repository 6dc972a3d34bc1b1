"""The cluster that is broken: a `twostroke serve` of our own, whose every process can be told to break."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import psutil

from cluster.clients.admin_access import TOKEN_FILE
from cluster.routers.process import is_ready
from router.addresses import Addresses
from tests import process_table
from tests.serving import serving
from tests.trials.chaos.faults.client import router_name
from tests.trials.chaos.injection import control
from tests.trials.chaos.injection.injector import BY_CALL, JOURNAL, NEXT_EPOCH, ONE
from tests.trials.chaos.injection.plan import ENVIRONMENT, Fault, Guard
from tests.trials.chaos.injection.points import Process
from twostroke.base.errors import PeerLost, ServeError
from twostroke.config import Role
from twostroke.rpc.channel import PeerChannel, error_of
from twostroke.rpc.v1 import control_pb2, control_pb2_grpc, fleet_pb2, fleet_pb2_grpc

ANSWER_S = 10.0
"""Longest wait for a process that is not broken, on a busy machine."""
POLL_S = 0.1
SUPERVISOR_TITLE = "ray::SupervisorActor"
HEAD_TITLE = "gcs_server"
RANK_TITLE = "-m twostroke.ranks"
HARNESS = ("-m", "tests.trials.chaos.injection.process", "cluster.cli")
"""What runs `serve` with processes that can be broken."""


@dataclass(frozen=True, slots=True)
class Target:
    kind: str
    name: str
    """Name in the journal."""
    address: str
    """The address of a server that it has."""


@dataclass(frozen=True, slots=True)
class Happened:
    """One line of the journal."""

    process: str
    pid: int
    fault: str
    at_s: float
    draft_age_s: float | None = None
    """Seconds since the process had run tokens of a draft model; None where it never had."""


@dataclass(frozen=True, slots=True)
class Served:
    """How the cluster serves, as far as who breaks it has to know."""

    ranks: int = 1
    """Ranks of each worker."""
    has_draft_model: bool = False
    all_travel: bool = False
    """Decode workers pull all prompts from prefill workers, and none from a peer that stays."""


class Bed:
    """Use `testbed`; or make one of processes that somebody else keeps alive."""

    def __init__(
        self,
        *,
        routers: Sequence[Addresses],
        model: str,
        journal: Path,
        workers: int,
        token: str,
        launcher: int | None = None,
        fleet_address: str | None = None,
        served: Served = Served(),
    ) -> None:
        """Without a `launcher` there is neither Ray nor a supervisor to break, and the fleet has to be named."""
        self.routers = routers
        self.model = model
        self.served = served
        self._launcher = launcher
        self._journal = journal
        self.workers = workers
        self._token = token
        self._fleet_address = fleet_address

    @property
    def has_supervisor(self) -> bool:
        return self._launcher is not None

    def head(self) -> psutil.Process:
        """Ray's: the launcher's, or the one that took its place. Raises PeerLost where there is none."""
        return process_titled(HEAD_TITLE, os.getpid())

    def processes(self) -> list[psutil.Process]:
        """The launcher and all below it."""
        assert self._launcher is not None
        return process_table.with_all_below(self._launcher)

    def other_ranks(self) -> list[psutil.Process]:
        """Returns all processes of ranks but the first ones, whoever is their parent now."""
        ranks = [process for process in psutil.process_iter() if RANK_TITLE in process_table.title_of(process)]
        return [rank for rank in ranks if process_table.environment_of(rank).get(JOURNAL) == str(self._journal)]

    async def targets(self) -> list[Target]:
        """Returns the targets whose addresses are known: all, once the cluster is whole."""
        view = await self.view()
        routers = [Target(Process.ROUTER, router_name(router), router.admin) for router in self.routers]
        workers = [Target(worker.role, worker.worker_id, worker.address) for worker in view.workers if worker.address]
        return [*routers, *workers, Target(Process.SUPERVISOR, Process.SUPERVISOR, await self.fleet_address())]

    async def view(self) -> fleet_pb2.FleetView:
        """What the supervisor says now, or when it is there again. Raises ServeError after ANSWER_S."""
        give_up_s = time.monotonic() + ANSWER_S
        while True:
            try:
                return await self._view_at(await self.fleet_address())
            except ServeError:
                self._forget_fleet()
                if time.monotonic() > give_up_s:
                    raise
            await asyncio.sleep(POLL_S)

    async def fleet_address(self) -> str:
        """Returns the supervisor's address. Raises PeerLost."""
        if self._fleet_address is None:
            self._fleet_address = await self._find_fleet()
        return self._fleet_address

    async def _view_at(self, address: str) -> fleet_pb2.FleetView:
        async with self.channel(address) as channel:
            call = fleet_pb2_grpc.FleetStub(channel.channel).Watch(
                fleet_pb2.WatchRequest(watcher="faults"), metadata=channel.metadata, timeout=ANSWER_S
            )
            try:
                view = await call.read()
            finally:
                call.cancel()
        if not isinstance(view, fleet_pb2.FleetView):
            raise PeerLost(f"{address} says nothing of the fleet")
        return view

    def _forget_fleet(self) -> None:
        """It may serve elsewhere in its next epoch, where there is one."""
        if self._launcher is not None:
            self._fleet_address = None

    async def _find_fleet(self) -> str:
        assert self._launcher is not None
        for port in sorted(process_table.listening_ports(process_titled(SUPERVISOR_TITLE, self._launcher))):
            with contextlib.suppress(ServeError):
                address = f"127.0.0.1:{port}"
                await self._view_at(address)
                return address
        raise PeerLost("the supervisor serves nowhere")

    @contextlib.asynccontextmanager
    async def channel(self, address: str) -> AsyncIterator[PeerChannel]:
        """To one process, with the cluster's token. What goes wrong there is raised as ServeError."""
        channel = PeerChannel(address, self._token)
        try:
            yield channel
        except grpc.aio.AioRpcError as error:
            raise error_of(error, address) from error
        finally:
            await channel.close()

    async def arm(self, target: Target, fault: Fault) -> None:
        await control.arm(self._journal, target.name, fault)

    def allow_once(self, fault: Fault) -> None:
        """In one process of all in which it will be armed."""
        Path(ONE.format(journal=self._journal, fault=fault)).touch()

    async def switch_off(self, guard: Guard | None) -> None:
        """In all routers and workers that live; None: all guards are on again."""
        for target in await self.targets():
            if target.kind != Process.SUPERVISOR:
                await control.switch_off(self._journal, target.name, guard)

    def arm_next_epoch(self, target: Target, fault: Fault) -> None:
        """Leaves a fault for the next epoch of a process that is about to die."""
        Path(NEXT_EPOCH.format(journal=self._journal, process=target.name)).write_text(str(fault))

    async def disarm(self, target: Target) -> dict[str, int]:
        """Links are as they were, too. How often its points have been reached. Raises ServeError."""
        return await control.heal(self._journal, target.name)

    def journal(self) -> list[Happened]:
        lines = self._journal.read_text().splitlines() if self._journal.exists() else []
        return [Happened(**json.loads(line)) for line in lines]

    async def load(self, address: str) -> control_pb2.WorkerLoad:
        """Returns the load of a worker, as it says itself. Raises PeerLost."""
        async with self.channel(address) as channel:
            return (await _loads(channel)).workers[0]

    async def forget_cached(self) -> None:
        """All that no request holds, on every worker."""
        async with self.channel(self.routers[0].admin) as channel:
            await control_pb2_grpc.ControlStub(channel.channel).ForgetCached(
                control_pb2.ForgetCachedRequest(), metadata=channel.metadata, timeout=ANSWER_S
            )

    async def epochs(self) -> dict[str, str]:
        """Returns the epochs of all workers. Raises ServeError."""
        return {worker.worker_id: worker.epoch for worker in (await self.view()).workers}

    async def whole_within(self, seconds: float, over: Mapping[str, str] | None = None) -> str | None:
        """None as soon as every process serves and every router knows; what is missing after so long.

        `over`: worker -> an epoch that has ended, though some still believe in it.
        """
        missing: str | None = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while (missing := await self._missing(over or {})) is not None:  # other processes have no events here
                    await asyncio.sleep(POLL_S)
        return missing

    async def _missing(self, over: Mapping[str, str]) -> str | None:
        try:
            view = await self._view_at(await self.fleet_address())
        except ServeError as error:
            self._forget_fleet()
            return f"supervisor: {error.message}"
        serving = {
            worker.worker_id: worker.epoch
            for worker in view.workers
            if worker.state == control_pb2.WORKER_STATE_SERVING and over.get(worker.worker_id) != worker.epoch
        }
        if len(serving) < self.workers:
            return f"only {sorted(serving)} serve"
        for router in self.routers:
            if not await is_ready(router.admin):
                return f"router {router.http} is not ready"
            try:
                known = await self.known_to(router)
            except ServeError as error:
                return f"router {router.grpc}: {error.message}"
            if known != serving:
                return f"router {router.grpc} knows {known} instead of {serving}"
        return None

    async def known_to(self, router: Addresses) -> dict[str, str]:
        """Workers that serve, as a router says."""
        async with self.channel(router.admin) as channel:
            loads = await _loads(channel)
        return {
            entry.worker_id: entry.server.epoch
            for entry in loads.workers
            if entry.load.state == control_pb2.WORKER_STATE_SERVING
        }


def process_titled(title: str, launcher: int) -> psutil.Process:
    """Below one that launched it. Raises PeerLost where there is none."""
    for process in process_table.below(launcher):
        if title in process_table.title_of(process):
            return process
    raise PeerLost(f"no process {title} below {launcher}")


async def _loads(channel: PeerChannel) -> control_pb2.GetLoadResponse:
    stub = control_pb2_grpc.ControlStub(channel.channel)
    return await stub.GetLoad(control_pb2.GetLoadRequest(), metadata=channel.metadata, timeout=ANSWER_S)


@contextlib.asynccontextmanager
async def testbed(
    folder: Path, flags: Sequence[str], environment: dict[str, str], served: Served
) -> AsyncIterator[tuple[Bed, Path]]:
    """Started with `flags` of `serve`, and where its logs are; two routers, two prefill and three decode workers."""
    journal = folder / "journal.jsonl"
    head_store = folder / "head"
    head_store.mkdir(exist_ok=True)
    variables = {
        ENVIRONMENT: BY_CALL,
        JOURNAL: str(journal),
        # The head's memory of actors is on disk, so that the head can be killed.
        "RAY_gcs_storage": "rocksdb",
        "RAY_gcs_storage_path": str(head_store),
    }
    counts = {Role.ROUTER: 2, Role.PREFILL: 2, Role.DECODE: 3}
    arguments = [
        *("--routers", str(counts[Role.ROUTER]), "--prefill", str(counts[Role.PREFILL])),
        *("--decode", str(counts[Role.DECODE]), "--http-port", "0", "--grpc-port", "0"),
        *flags,
    ]
    async with serving(arguments, variables | environment, HARNESS) as state:
        bed = Bed(
            routers=state.routers,
            model=state.model,
            journal=journal,
            workers=counts[Role.PREFILL] + counts[Role.DECODE],
            token=(Path(state.log_dir) / TOKEN_FILE).read_text(),
            launcher=state.pid,
            served=served,
        )
        yield bed, Path(state.log_dir)
