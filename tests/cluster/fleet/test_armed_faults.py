"""Faults armed in processes that run: they happen where they were meant to, and no client notices."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import pytest

from tests.cluster.cache.test_index_equality import until_equal
from tests.cluster.processes import PATIENCE_S, Client, running_cluster
from tests.trials.chaos.injection.control import arm
from twostroke.config import CacheConfig, ModelConfig, ScheduleConfig
from twostroke.rpc.v1 import control_pb2

PACED = ModelConfig(model="paced:step_ms=4,prefill_tokens_per_s=50000,page_bytes=4096,max_model_len=2048")
POOL = CacheConfig(kv_cache_memory_bytes=4 << 20)
PULLING = ScheduleConfig(local_prefill=False)
"""The prefill worker computes each prompt, and has events to lose, however busy the machine is."""
PROMPT = [7] * 16 * 12 + [1, 2, 3]


def happened(journal: Path) -> list[tuple[str, str]]:
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    return [(line["process"], line["fault"]) for line in lines]


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "journal"
    path.touch()
    monkeypatch.setenv("TWOSTROKE_FAULT", "control")
    monkeypatch.setenv("TWOSTROKE_FAULT_JOURNAL", str(path))
    return path


async def test_armed_faults_happen_and_streams_go_on_with_the_same_tokens(journal: Path) -> None:
    async with running_cluster(
        prefill=1, decode=2, model=PACED, cache=POOL, schedule=PULLING, policy="round-robin"
    ) as cluster:
        client = Client(cluster.grpc)
        router = f"router-{cluster.grpc.rpartition(':')[2]}"

        async def answers() -> list[list[int]]:
            options = {"max_tokens": 40, "ignore_eos": True, "temperature": 0.9, "seed": 3, "speculation": "off"}
            return await asyncio.gather(*(client.tokens([i, *PROMPT], **options) for i in range(6)))

        await arm(journal, router, "router.events:lose:1")
        await arm(journal, "prefill-0", "worker.events:lose:1")
        expected = await answers()
        async with asyncio.timeout(PATIENCE_S):
            while len(happened(journal)) < 2:
                await asyncio.sleep(0.01)
        await until_equal(cluster)
        await arm(journal, "decode-0", "decode.sending:kill:10")
        worker = cluster.workers["decode-0"]

        async def answer_until_the_worker_is_dead() -> None:
            while worker.process.returncode is None:
                assert await answers() == expected

        streams = asyncio.create_task(answer_until_the_worker_is_dead())
        async with asyncio.timeout(PATIENCE_S):
            assert await worker.process.wait() == -signal.SIGKILL
        worker.state = control_pb2.WORKER_STATE_DEAD
        cluster.publish()
        await streams
        assert sorted(happened(journal)) == [
            ("decode-0", "decode.sending:kill:10:10"),
            ("prefill-0", "worker.events:lose:1:10"),
            (router, "router.events:lose:1:10"),
        ]
        await client.close()
