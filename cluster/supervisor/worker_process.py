"""What the supervisor asks of one worker's process: where it is, whether it answers, that it ends."""

from __future__ import annotations

import asyncio
import logging
import time

from cluster.supervisor.actors import ActorLocation
from cluster.supervisor.backend import WorkerDied, WorkerHandle
from cluster.values.exits import ProcessExit
from twostroke.base.errors import ServeError
from twostroke.rpc.silence import listening

log = logging.getLogger(__name__)

PLACED_S = 10.0
"""Seconds after which a worker without a process is logged: nothing else tells that Ray waits for room."""
SHUTDOWN_S = 5.0
"""Seconds after which a worker that has not shut down is killed."""
PING_S = 5.0
"""Seconds between two checks whether a worker still answers."""
FROZEN_S = 30.0
"""Seconds without an answer before the process is killed, long after routers avoid it.

A cache is worth more than a few seconds. What freezes a process often passes: a debugger, a stalled disk, a machine
that is moved.
"""


async def place_of(worker_id: str, handle: WorkerHandle) -> ActorLocation:
    text = "worker has no process yet: Ray waits for a node with room for it worker=%s"
    tell = asyncio.get_running_loop().call_later(PLACED_S, log.warning, text, worker_id)
    try:
        return await handle.place()
    finally:
        tell.cancel()


async def recycle_when_frozen(worker_id: str, handle: WorkerHandle) -> None:
    """Restarts a frozen process. Routers avoid it, but its memory and devices would serve nobody."""
    try:
        while True:
            await asyncio.sleep(PING_S)
            async with listening(FROZEN_S):
                await handle.place()
    except TimeoutError:
        log.error("worker frozen: a new process takes its place worker=%s silent_s=%g", worker_id, FROZEN_S)
        handle.recycle()
    except ServeError as error:
        # run() ends too; its error says what happened.
        log.info("worker not reached worker=%s error=%s", worker_id, error)


async def remove(worker_id: str, handle: WorkerHandle) -> ProcessExit:
    stopped_s, is_own = time.monotonic(), True
    try:
        await asyncio.wait_for(handle.shutdown(), SHUTDOWN_S)
    except WorkerDied:
        log.info("worker was gone already worker=%s", worker_id)
    except (ServeError, TimeoutError) as error:
        is_own = False
        log.warning("worker did not shut down by itself worker=%s error=%r", worker_id, error)
    handle.remove()
    return ProcessExit(worker_id, time.monotonic() - stopped_s, is_own)
