"""One fault after the other to a cluster under load, and what came of each."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import grpc.aio

from tests.trials.chaos.faults.answer import Transcript, difference, longest_wait_s
from tests.trials.chaos.faults.client import Clients
from tests.trials.chaos.faults.leak_check import leaks_within, refusals
from tests.trials.chaos.faults.load import Ask, Conduct, Load, asks, long_ones
from tests.trials.chaos.faults.testbed import ANSWER_S, POLL_S, Bed
from tests.trials.chaos.hosts.faults import HostFault, Victim
from tests.trials.chaos.hosts.network import Host
from tests.trials.chaos.hosts.result import Result
from tests.trials.chaos.hosts.sightings import Sightings
from tests.trials.chaos.hosts.site import Site
from twostroke.base.errors import ConfigError, ServeError
from twostroke.rpc.v1 import control_pb2, control_pb2_grpc, fleet_pb2, fleet_pb2_grpc

LONG = 6
"""Streams that last longer than any fault."""
BEGIN_S = 20.0
"""For all of them to have a first token."""
STREAMING_S = 1.5
"""Before the fault."""
WHOLE_S = 180.0
"""For all to serve again, on a busy machine: a node of Ray needs many seconds to start."""
REST_S = 30.0
FENCED_S = 60.0
"""Time for a replaced epoch to end, once its host is back."""
NOTICED_S = 4.0
"""For a head that was killed to take the supervisor along."""
LOOK_S = 0.25
ASK_S = 1.0
DRAIN_S = 5.0


@dataclass(frozen=True, slots=True)
class Struck:
    """Before it was."""

    host: Host
    workers: Mapping[str, fleet_pb2.WorkerEntry]
    """Workers of the host when it was struck."""

    @property
    def epochs(self) -> dict[str, str]:
        return {name: worker.epoch for name, worker in self.workers.items()}


class HostFaultRun:
    """`prepare` first."""

    def __init__(self, site: Site, bed: Bed, clients: Clients, load: Load) -> None:
        self._site, self._bed, self._clients = site, bed, clients
        self._asks = asks(load.seed, tokens=load.tokens, prompt_letters=load.prompt_letters)
        self._long = long_ones(load.seed, LONG, tokens=load.long_tokens)
        self._expected: dict[str, Transcript] = {}

    async def prepare(self) -> None:
        """What every stream is while nothing is broken. Raises ConfigError."""
        missing = await self._bed.whole_within(WHOLE_S)
        if missing is not None:
            raise ConfigError(f"the cluster is not whole before anything was broken: {missing}")
        first = await self._ask_all([ask.staying() for ask in [*self._asks, *self._long]])
        texts = {transcript.name: transcript.choices[0].text for transcript in first if transcript.choices}
        self._asks = [ask.stopping_within(texts[ask.name]) if ask.stops_early else ask for ask in self._asks]
        again = await self._ask_all([ask.staying() for ask in self._asks])
        self._expected = {transcript.name: transcript for transcript in [*first, *again]}
        failed = [transcript.failure for transcript in self._expected.values() if transcript.failure]
        if failed:
            raise ConfigError(f"without any fault: {failed[0]}")

    async def one(self, fault: HostFault, run: int) -> Result:
        """A cluster that is past help is a result, too."""
        struck = Struck(self._site.head, {})
        try:
            await self._spread()
            struck = await self._victim(fault.victim)
            return await self._one(fault, struck, run)
        except ServeError as error:
            missing = f"past help: {type(error).__name__}: {error}"
            return Result(fault=str(fault), host=struck.host.name, run=run, bound_s=fault.bound_s, missing=missing)

    async def _one(self, fault: HostFault, struck: Struck, run: int) -> Result:
        before, joined = await refusals(self._bed), self._site.joined(struck.host)
        sightings, is_over = Sightings(), asyncio.Event()
        long = [asyncio.create_task(self._clients.follow(ask, at)) for at, ask in enumerate(self._long)]
        waves = asyncio.create_task(self._waves(is_over))
        looking = asyncio.create_task(self._look(sightings, is_over))
        try:
            await asyncio.sleep(STREAMING_S)
            fault_s = time.time()
            await asyncio.to_thread(fault.strike, struck.host)
            whole = asyncio.create_task(self._whole_again(fault, struck, fault_s))
            await asyncio.sleep(max(0.0, fault_s + fault.held_s - time.time()))
            await asyncio.to_thread(fault.mend, struck.host)
            fenced_s = await self._fenced_s(struck) if fault.ends_epochs else None
            missing, capacity_s = await whole
            if fault.ends_epochs or fault.victim is Victim.HEAD:
                missing = missing or await self._site.joined_within(WHOLE_S, struck.host, joined)
                missing = missing or await self._site.launcher_within(WHOLE_S)
            got = list(await asyncio.gather(*long))
            is_over.set()
            got += await asyncio.wait_for(asyncio.shield(waves), REST_S + BEGIN_S)
        finally:
            is_over.set()
            for task in (*long, waves, looking):
                task.cancel()
            await asyncio.gather(*long, waves, looking, return_exceptions=True)
        missing = missing or await self._bed.whole_within(WHOLE_S)
        waits = [wait for each in got if (wait := longest_wait_s(each, fault_s)) is not None]
        later = [wait for each in got if each.began_s > fault_s and (wait := longest_wait_s(each, each.began_s))]
        return Result(
            fault=str(fault),
            host=struck.host.name,
            run=run,
            bound_s=fault.bound_s,
            streams=len(got),
            open_streams=len(waits),
            wrong=tuple(wrong for each in got if (wrong := difference(self._expected[each.name], each)) is not None),
            turned=() if fault.takes_routers else tuple(turn for each in got for turn in self._turns(each)),
            recovery_s=max(waits, default=None),
            later_s=max(later, default=None),
            capacity_s=capacity_s,
            fenced_s=fenced_s,
            overlaps=tuple(sorted(sightings.problems)),
            missing=missing,
            left=await leaks_within(self._bed, REST_S),
            refused=await self._refused_since(before),
        )

    def _turns(self, transcript: Transcript) -> list[str]:
        """Describes turns to another router, of clients that stay where they are for as long as they are served."""
        moves = {ask.name for ask in self._asks if ask.conduct is Conduct.MOVES}
        turns = transcript.turns[1:] if transcript.name in moves else transcript.turns
        return [f"{transcript.name} went to another router: {turn}" for turn in turns]

    async def _victim(self, kind: Victim) -> Struck:
        """The host of the first worker of that role, and all workers that are there."""
        if kind is Victim.HEAD:
            return Struck(self._site.head, {})
        workers = (await self._bed.view()).workers
        first = next(worker for worker in workers if worker.role == kind.value)
        host = self._site.host_at(first.address)
        return Struck(host, {m.worker_id: m for m in workers if self._site.host_at(m.address) is host})

    async def _whole_again(self, fault: HostFault, struck: Struck, fault_s: float) -> tuple[str | None, float | None]:
        """What is missing in the end; how long it took."""
        if fault.victim is Victim.HEAD:
            await asyncio.sleep(NOTICED_S)
        missing = await self._bed.whole_within(WHOLE_S, struck.epochs if fault.ends_epochs else None)
        return missing, None if missing else time.time() - fault_s

    async def _fenced_s(self, struck: Struck) -> float | None:
        """Waits until none of the workers that were struck answers any more. Raises ConfigError where one goes on."""
        began_s = time.monotonic()
        found = False
        for worker in struck.workers.values():
            while await self._answers(worker):
                found = True
                if time.monotonic() - began_s > FENCED_S:
                    raise ConfigError(f"{worker.worker_id}: its epoch {worker.epoch} goes on at {worker.address}")
                await asyncio.sleep(POLL_S)
        return time.monotonic() - began_s if found else None

    async def _answers(self, worker: fleet_pb2.WorkerEntry) -> bool:
        """Returns whether that very epoch answers."""
        try:
            async with self._bed.channel(worker.address) as channel:
                info = await control_pb2_grpc.ControlStub(channel.channel).GetServerInfo(
                    control_pb2.GetServerInfoRequest(), metadata=channel.metadata, timeout=ASK_S
                )
        except ServeError:
            return False
        return bool(info.epoch == worker.epoch)

    async def _waves(self, is_over: asyncio.Event) -> list[Transcript]:
        got: list[Transcript] = []
        while not is_over.is_set():
            got += await self._ask_all(self._asks)
        return got

    async def _ask_all(self, load: Sequence[Ask]) -> list[Transcript]:
        """At both routers in turns."""
        return await asyncio.gather(*(self._clients.follow(ask, at) for at, ask in enumerate(load)))

    async def _look(self, sightings: Sightings, is_over: asyncio.Event) -> None:
        while not is_over.is_set():
            with contextlib.suppress(ServeError):  # the supervisor may be away
                view = await self._bed.view()
                sightings.see("the supervisor", [(worker.worker_id, worker.epoch) for worker in view.workers])
            for router in self._bed.routers:
                with contextlib.suppress(ServeError):
                    sightings.see(f"router {router.grpc}", (await self._bed.known_to(router)).items())
            await asyncio.sleep(LOOK_S)

    async def _spread(self) -> None:
        """No host has two decode workers: what is struck shall be a part of them. Raises ServeError."""
        give_up_s = time.monotonic() + WHOLE_S
        while (crowded := await self._crowded()) is not None:
            if time.monotonic() > give_up_s:
                raise ConfigError(f"{crowded} does not leave the host that it shares")
            request = fleet_pb2.DrainWorkerRequest(worker_id=crowded, deadline_s=DRAIN_S, restart=True)
            async with self._bed.channel(await self._bed.fleet_address()) as channel:
                stub = fleet_pb2_grpc.FleetStub(channel.channel)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await stub.DrainWorker(request, metadata=channel.metadata, timeout=DRAIN_S + ANSWER_S)
            await self._bed.whole_within(WHOLE_S)

    async def _crowded(self) -> str | None:
        """A worker that is where another one is, or on a host of the other role."""
        seen: set[str] = set()
        for worker in (await self._bed.view()).workers:
            host = self._site.host_at(worker.address)
            if host.name in seen or (self._site.has_host_for(worker.role) and not host.name.startswith(worker.role)):
                return str(worker.worker_id)
            seen.add(host.name)
        return None

    async def _refused_since(self, before: Mapping[str, int]) -> dict[str, int]:
        """Counters of a process that began again are as they are."""
        after = await refusals(self._bed)
        return {name: count - min(count, before.get(name, 0)) for name, count in after.items() if count}
