"""Helpers of tests that kill decode workers while a real model answers."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from tests import metrics_page
from tests.cluster.processes import ProcessCluster
from twostroke.config import SPECULATE_OFF

T = TypeVar("T")
DECODE_WORKERS = ("decode-0", "decode-1")
IDLE_TIMES = 3
"""How often a worker is asked in a row that has nothing to do: between two rounds it has something soon."""


def undrafted(modes: Mapping[str, Mapping[str, object]]) -> dict[str, dict[str, object]]:
    """The same requests without speculation: answers that were given before would end before a worker is killed."""
    return {mode: {**options, "speculation": SPECULATE_OFF} for mode, options in modes.items()}


async def asked_until(is_over: asyncio.Event, ask: Callable[[], Awaitable[T]]) -> list[T]:
    """Asks the same again and again, so that workers are busy whenever one is killed. Returns what each round said."""
    rounds = [await ask()]
    while not is_over.is_set():
        rounds.append(await ask())
    return rounds


async def asked_over_a_death(cluster: ProcessCluster, ask: Callable[[], Awaitable[T]]) -> list[T]:
    """Asks several answers at once, again and again, while a decode worker is killed. Returns what each round said.

    The router has to use the two workers by turns: a worker that stands still holds an answer of the round that is
    under way or of the next one, and no later round begins before it is killed.
    """
    is_killed = asyncio.Event()
    asked = asyncio.ensure_future(asked_until(is_killed, ask))
    victim = await _busiest(cluster, set(DECODE_WORKERS), 1, asked)
    (other,) = {*DECODE_WORKERS} - {victim}
    cluster.workers[victim].process.send_signal(signal.SIGSTOP)
    await _until_idle(cluster, other)
    await cluster.kill(victim)
    is_killed.set()
    rounds = await asked
    assert metrics_page.total(cluster.http, "twostroke_reopened_requests_total") > 0
    return rounds


async def _until_idle(cluster: ProcessCluster, worker: str) -> None:
    idle = 0
    while idle < IDLE_TIMES:
        load = await cluster.load(worker)
        idle = 0 if load.running or load.waiting else idle + 1
        await asyncio.sleep(0.1)


async def kill_the_busiest(cluster: ProcessCluster, workers: set[str], tokens: int, asked: asyncio.Future[Any]) -> str:
    """Kills the first of `workers` that draws so many tokens from now on, takes it out of the set and returns it.

    `asked` is what they answer meanwhile.
    """
    victim = await _busiest(cluster, workers, tokens, asked)
    await cluster.kill(victim)
    workers.remove(victim)
    return victim


async def _busiest(cluster: ProcessCluster, workers: set[str], tokens: int, asked: asyncio.Future[Any]) -> str:
    def drawn() -> dict[str, float]:
        return {worker: cluster.metric(worker, "twostroke_sampled_tokens_total") for worker in sorted(workers)}

    before = drawn()
    while not (found := [worker for worker, count in drawn().items() if count >= before[worker] + tokens]):
        assert not asked.done(), f"all is answered: {asked.result()}"
        await asyncio.sleep(0.01)
    return found[0]
