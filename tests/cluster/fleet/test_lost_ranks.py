"""Workers of two ranks, one of which dies or freezes within streams: the worker is replaced, and no client notices."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from pathlib import Path
from typing import Final

import pytest

from tests.cluster.fleet.test_engine_loss import replaced
from tests.cluster.lent import forget_cached
from tests.cluster.processes import PATIENCE_S, ProcessCluster
from tests.cluster.reference import mismatches
from tests.cluster.requests.test_families import PAGES, answers_of, saved_with_tokenizer, serving
from twostroke.worker.process import ENGINE_LOST

COMPUTED = "twostroke_computed_tokens_total"
Loss = tuple[str, signal.Signals]
LOSSES: Final[tuple[tuple[Loss, ...], ...]] = (
    (("decode-0", signal.SIGKILL), ("prefill-0", signal.SIGSTOP)),
    (("decode-0", signal.SIGSTOP), ("prefill-0", signal.SIGKILL)),
)


def pid_of_other_rank(cluster: ProcessCluster, worker_id: str) -> int:
    """Returns the child process of a worker that is its second rank."""
    tasks = Path(f"/proc/{cluster.workers[worker_id].process.pid}/task").glob("*/children")
    children = [int(pid) for task in tasks for pid in task.read_text().split()]
    (rank,) = [pid for pid in children if b"twostroke.ranks" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return rank


def has_ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], PATIENCE_S)[0])


async def until_it_computes(cluster: ProcessCluster, worker_id: str, before: float) -> None:
    while cluster.metric(worker_id, COMPUTED) == before:
        await asyncio.sleep(0.005)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("losses", LOSSES)
async def test_streams_are_whole_where_a_rank_of_a_worker_dies_or_freezes(
    tmp_path: Path, losses: tuple[Loss, ...]
) -> None:
    expected = saved_with_tokenizer("phi3", tmp_path, some=(47,), growing=2, grown_tokens=40)
    async with serving(tmp_path, 4 * PAGES, (2, 2)) as (cluster, client):
        assert mismatches(expected, await answers_of(client, expected)) == []
        for worker_id, number in losses:
            rank = os.pidfd_open(pid_of_other_rank(cluster, worker_id))
            ending = asyncio.create_task(replaced(cluster, worker_id))
            await forget_cached(cluster)
            before = cluster.metric(worker_id, COMPUTED)
            asked = asyncio.create_task(answers_of(client, expected))
            async with asyncio.timeout(PATIENCE_S):
                await until_it_computes(cluster, worker_id, before)
                signal.pidfd_send_signal(rank, number)
                assert mismatches(expected, await asked) == [], (worker_id, number)
                assert await ending == ENGINE_LOST
                assert has_ended(rank)
            os.close(rank)
        assert mismatches(expected, await answers_of(client, expected)) == []
        assert cluster.logs().count("engine lost open=") == len(losses)
        assert "Traceback" not in cluster.logs(), "the line about the lost engine says all"
