"""Helpers of tests that kill decode workers while a real model answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from tests.cluster.processes import ProcessCluster
from twostroke.config import SPECULATE_OFF

T = TypeVar("T")


def undrafted(modes: Mapping[str, Mapping[str, object]]) -> dict[str, dict[str, object]]:
    """The same requests without speculation: answers that were given before would end before a worker is killed."""
    return {mode: {**options, "speculation": SPECULATE_OFF} for mode, options in modes.items()}


async def asked_until(is_over: asyncio.Event, ask: Callable[[], Awaitable[T]]) -> list[T]:
    """Asks the same again and again, so that workers are busy whenever one is killed. Returns what each round said."""
    rounds = [await ask()]
    while not is_over.is_set():
        rounds.append(await ask())
    return rounds


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
