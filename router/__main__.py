"""`python -m router`: serve until SIGTERM or SIGINT.

A RouterConfig is read as JSON from stdin, because it holds the cluster's token and every user can read arguments. One
line of JSON on stdout names the router's addresses once it serves. SIGTERM lets open requests finish for some seconds;
SIGINT and any second signal do not. SIGUSR1 says that a new process serves on the same ports: this one finishes its
open requests, refuses no client, and ends. The exit status is 0 after a signal, 2 for a configuration that cannot be
served, 1 if the router itself failed.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

from router.branches import BRANCHES, NAMED_MODELS
from router.metrics import RouterMetrics
from router.preparation.prepared_texts import PreparedTexts
from router.preparation.preparer import ProcessPreparer
from router.server import RouterServer
from router.serving.dispatcher import RouterCore
from router.text.text_files import one_text
from router.text.tokenizer import load_text
from twostroke.base import allocator
from twostroke.base.allocator import give_large_buffers_back
from twostroke.base.errors import ConfigError
from twostroke.base.json_values import to_json
from twostroke.config import RouterConfig
from twostroke.observability.telemetry import configure_logging

HAND_OVER_S = 120.0
"""Seconds that open requests get to finish once a new process serves new ones."""
READY_S = 10.0
"""Seconds that a restarted router waits for a worker before it serves and reports that there is none."""


async def serve(config: RouterConfig) -> None:
    _allow_many_sockets()
    metrics = RouterMetrics()
    with one_text(config.model_dir):
        core = RouterCore(config, metrics, NAMED_MODELS)
        texts = PreparedTexts(config.endpoints.text_cache_bytes, metrics)
        preparer = ProcessPreparer(load_text(config.model_dir, config.output), config.model_dir, texts)
    configure_logging(core.router_id, owns_files=config.owns_log_file)
    server = RouterServer(
        config,
        core,
        preparer,
        metrics,
        router_id=core.router_id,
        recorder=core.recorder,
        reservations=core.reservations,
        branches=BRANCHES,
    )
    signals = _signals()
    await core.start(server.peer_address)
    try:
        if config.is_restart:
            await _first(core.until_ready(READY_S), core.ended())
        async with server.serving():
            allocator.freeze_loaded_objects()
            print(to_json(server.addresses), flush=True)
            try:
                received = await _first(signals.get(), core.ended())
                if received == signal.SIGUSR1:
                    received = await _first(server.hand_over(HAND_OVER_S), signals.get())
                if received == signal.SIGTERM:
                    await _first(server.drain(config.drain_grace_s), signals.get())
            finally:
                await core.close()  # ends open requests, for which the server would wait
    finally:
        await core.close()  # also if the server could not start


def main() -> int:
    parser = argparse.ArgumentParser("python -m router", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.parse_args()
    give_large_buffers_back()
    return run(lambda: RouterConfig.from_json(sys.stdin.read()))


def run(configured: Callable[[], RouterConfig]) -> int:
    """Serves, and returns the exit status."""
    try:
        asyncio.run(serve(configured()))
    except ConfigError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2
    except Exception as error:
        traceback.print_exc()
        print(f"error: the router failed: {_cause(error)!r}", file=sys.stderr)
        return 1
    return 0


def _allow_many_sockets() -> None:
    """Raises the limit of open files to the hard limit: each client has a socket."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _signals() -> asyncio.Queue[signal.Signals]:
    caught: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        asyncio.get_running_loop().add_signal_handler(number, caught.put_nowait, number)
    return caught


async def _first(*waits: Coroutine[Any, Any, object]) -> object:
    """Returns the result of the first coroutine to end, or raises its error, and cancels the others."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return done.pop().result()


def _cause(error: BaseException) -> BaseException:
    """Returns the first error inside nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


if __name__ == "__main__":
    sys.exit(main())
