"""What has to happen, besides requests, for some points to be reached."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

from tests.trials.chaos.faults import pins
from tests.trials.chaos.faults.testbed import ANSWER_S, POLL_S, Bed, Target
from tests.trials.chaos.injection.plan import Fault, Kind
from tests.trials.chaos.injection.points import Process
from twostroke.base.fault_points import Point
from twostroke.rpc.v1 import fleet_pb2, fleet_pb2_grpc

DRAIN_S = 5.0
CACHED_S = 1.0
"""For the first of a family to leave something in a cache."""
RETURN_S = 15.0
"""For a worker to be there again; longer than its supervisor is frozen."""

Trigger = Callable[[Bed, Target, Fault, random.Random], Awaitable[None]]


async def worker_dies(bed: Bed, draws: random.Random, kind: str = Process.PREFILL) -> None:
    """Kills a worker, which is started again."""
    workers = [target for target in await bed.targets() if target.kind == kind]
    worker, epochs = draws.choice(workers), await bed.epochs()
    await bed.arm(worker, Fault(Point.WORKER_EVENTS, Kind.KILL))
    await bed.whole_within(RETURN_S, over={worker.name: epochs[worker.name]})


async def supervisor_has_to_act(bed: Bed, broken: Target, fault: Fault, draws: random.Random) -> None:
    del broken, fault
    await worker_dies(bed, draws)


async def somebody_watches(bed: Bed, broken: Target, fault: Fault, draws: random.Random) -> None:
    del broken, fault, draws
    await bed.view()


async def worker_is_drained(bed: Bed, broken: Target, fault: Fault, draws: random.Random) -> None:
    """The broken one, if it is a worker."""
    del fault
    workers = [target for target in await bed.targets() if target.kind in (Process.PREFILL, Process.DECODE)]
    await _drain(bed, broken if broken.kind in (Process.PREFILL, Process.DECODE) else draws.choice(workers))


async def peer_leaves(bed: Bed, broken: Target, fault: Fault, draws: random.Random) -> None:
    """To others of its kind, which fetch what it holds, as soon as any holds something.

    Of decode workers it is the one with most streams, which go on while their pages are fetched; else the one that
    holds most.
    """
    del fault
    give_up_s = time.monotonic() + CACHED_S
    while True:
        workers = [target for target in await bed.targets() if target.kind == broken.kind]
        loads = {worker: (await bed.load(worker.address)).load for worker in workers}
        if any(load.pages_cached for load in loads.values()) or time.monotonic() > give_up_s:
            break
        await asyncio.sleep(POLL_S)
    draws.shuffle(workers)

    def weight(worker: Target) -> tuple[int, int]:
        load = loads[worker]
        return load.running if worker.kind == Process.DECODE else 0, load.pages_cached

    await _drain(bed, max(workers, key=weight))


async def _drain(bed: Bed, worker: Target) -> None:
    request = fleet_pb2.DrainWorkerRequest(worker_id=worker.name, deadline_s=DRAIN_S, restart=True)
    async with bed.channel(await bed.fleet_address()) as channel:
        await fleet_pb2_grpc.FleetStub(channel.channel).DrainWorker(
            request, metadata=channel.metadata, timeout=DRAIN_S + ANSWER_S
        )


async def supervisor_begins_again(bed: Bed, broken: Target, fault: Fault, draws: random.Random) -> None:
    """With its fault from the start: it has come to the point before it can be called."""
    del draws
    bed.arm_next_epoch(broken, fault)
    await bed.arm(broken, Fault(Point.SUPERVISOR_WATCHED, Kind.KILL))
    await bed.view()


async def somebody_pins(bed: Bed, broken: Target, fault: Fault, draws: random.Random) -> None:
    """A prefix that no worker has: all are to compute it."""
    del broken, fault
    await pins.put(bed, draws)


async def somebody_unpins(bed: Bed, broken: Target, fault: Fault, draws: random.Random) -> None:
    await somebody_pins(bed, broken, fault, draws)
    await pins.remove(bed)


async def worker_with_a_pin_dies(bed: Bed, broken: Target, fault: Fault, draws: random.Random) -> None:
    await somebody_pins(bed, broken, fault, draws)
    await worker_dies(bed, draws)


TRIGGERS: dict[Point, Trigger] = {
    Point.SUPERVISOR_STARTING: supervisor_has_to_act,
    Point.SUPERVISOR_ANNOUNCING: supervisor_has_to_act,
    Point.SUPERVISOR_WORKER_ENDED: supervisor_has_to_act,
    Point.SUPERVISOR_WATCHED: somebody_watches,
    Point.SUPERVISOR_DRAINING: worker_is_drained,
    Point.WORKER_DRAINING: worker_is_drained,
    Point.SUPERVISOR_CREATING: supervisor_begins_again,
    Point.ROUTER_PINNING: somebody_pins,
    Point.PIN_PUTTING: somebody_pins,
    Point.PIN_BUILDING: somebody_pins,
    Point.PIN_BUILT: somebody_pins,
    Point.SUPERVISOR_PINNING: somebody_pins,
    Point.SUPERVISOR_PINNED: somebody_pins,
    Point.SUPERVISOR_UNPINNING: somebody_unpins,
    Point.SUPERVISOR_GIVING_PINS: worker_with_a_pin_dies,
}
ON_NEW_CONNECTIONS = frozenset({Point.TRANSPORT_CONNECTING, Point.TRANSPORT_GREETED})
"""Workers keep the connections that they have: only a new epoch of one opens new ones."""
WRITING = frozenset({Point.TIER_WRITING, Point.TIER_WRITTEN})
"""Reached where a pool gives pages away; a prefill worker's does so for prompts alone."""
CROWDED = frozenset(
    {Point.DECODE_PREEMPTED, Point.TIER_WRITING, Point.TIER_WRITTEN, Point.TIER_LOADING, Point.TIER_LOADED}
)
"""Reached where more sequences grow than a pool has pages for, or come back to what it had no room for."""
