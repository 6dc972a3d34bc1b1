"""A worker as a process without Ray: configuration in, one line of JSON out, serve until SIGTERM."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import signal
import sys
from collections.abc import Callable

from twostroke.base import allocator
from twostroke.base.errors import EngineLost, ServeError
from twostroke.config import WorkerConfig
from twostroke.observability.telemetry import configure_logging
from twostroke.worker.worker import BaseWorker

log = logging.getLogger(__name__)

ENGINE_LOST = 3
"""Exit status of a process with a failed engine or device: start another one."""
DRAIN_S = 30.0
"""Seconds for which SIGTERM waits for open requests; a second signal ends the wait."""


def main(worker_class: Callable[[WorkerConfig], BaseWorker]) -> int:
    """Reads a WorkerConfig as JSON from stdin (it holds secrets), serves, and prints ReadyInfo as JSON once ready."""
    try:
        config = WorkerConfig.from_json(sys.stdin.read())
        configure_logging(config.worker_id)
        asyncio.run(_serve(worker_class(config)))
    except EngineLost as error:
        print(f"{type(error).__name__}: {error.message}", file=sys.stderr)
        logging.shutdown()
        os._exit(ENGINE_LOST)  # Python would wait for the engine's thread, which may never end
    except ServeError as error:
        print(f"{type(error).__name__}: {error.message}", file=sys.stderr)
        return 2
    return 0


async def _serve(worker: BaseWorker) -> None:
    stopping = asyncio.Event()
    hurry = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: hurry.set() if stopping.is_set() else stopping.set())
    running = asyncio.ensure_future(worker.run())
    starting = asyncio.ensure_future(worker.ready())
    await _first(starting, stopping.wait())
    if not starting.done():
        _end_before_ready()
    try:
        info = await starting
        allocator.freeze_loaded_objects()
        print(json.dumps(dataclasses.asdict(info)), flush=True)
        await _first(running, stopping.wait())
        if not running.done():
            await _first(running, worker.drain(DRAIN_S), hurry.wait())
    finally:
        await worker.shutdown()
        await running


def _end_before_ready() -> None:
    """Ends the process at once: it has no work, and a thread that loads or scans cannot be stopped.

    The kernel frees its memory and the lock of its folder on disk.
    """
    log.info("ended before it served")
    logging.shutdown()
    os._exit(0)


async def _first(*awaitables: object) -> None:
    """Waits until one of these is done, and cancels the others, but never the first one."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]  # type: ignore[call-overload]  # any mix
    _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        if task is not awaitables[0]:
            task.cancel()
