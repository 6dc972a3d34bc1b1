"""A cluster without Ray whose processes are started again when they die, and that can be broken on purpose."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.cluster.processes import TOKEN, ProcessCluster, running_cluster
from tests.trials.chaos.faults.testbed import Bed
from tests.trials.chaos.injection.injector import BY_CALL, JOURNAL
from tests.trials.chaos.injection.plan import ENVIRONMENT
from twostroke.config import CacheConfig, ModelConfig, ScheduleConfig
from twostroke.config.output import OutputConfig
from twostroke.rpc.v1 import control_pb2

MODEL = ModelConfig(model="paced:step_ms=6,prefill_tokens_per_s=12000,max_model_len=2048,page_bytes=128,eos=1")
POOL = CacheConfig(kv_cache_memory_bytes=80 * 128)


@asynccontextmanager
async def restarting_cluster(monkeypatch: pytest.MonkeyPatch, folder: Path, *, decode: int) -> AsyncIterator[Bed]:
    """Two routers, one prefill worker."""
    journal = folder / "journal.jsonl"
    monkeypatch.setenv(ENVIRONMENT, BY_CALL)
    monkeypatch.setenv(JOURNAL, str(journal))
    # All prompts travel: nobody weighs whether that is worth it.
    travelling = running_cluster(
        prefill=1,
        decode=decode,
        model=MODEL,
        cache=POOL,
        schedule=ScheduleConfig(local_prefill=False),
        policy="round-robin",
        routers=2,
        output=OutputConfig(tool_call_parser="hermes"),
        transports=("tcp",),
    )
    async with (
        travelling as cluster,
        asyncio.TaskGroup() as keeping,
    ):
        tasks = [keeping.create_task(_keep_worker(cluster, name)) for name in cluster.workers]
        tasks += [keeping.create_task(_keep_router(cluster, index)) for index in cluster.routers]
        yield Bed(
            routers=[router.addresses for router in cluster.routers.values()],
            model=MODEL.public_name,
            journal=journal,
            workers=len(cluster.workers),
            token=TOKEN,
            fleet_address=cluster.fleet_address,
        )
        for task in tasks:
            task.cancel()


async def _keep_worker(cluster: ProcessCluster, name: str) -> None:
    while True:
        worker = cluster.workers[name]
        await worker.process.wait()
        worker.state = control_pb2.WORKER_STATE_DEAD
        cluster.publish()
        await cluster.restart(name)


async def _keep_router(cluster: ProcessCluster, index: int) -> None:
    while True:
        router = cluster.routers[index]
        await router.process.wait()
        await cluster.start_router(None, index, router.addresses)
