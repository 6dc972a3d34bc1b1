"""A decode worker of two ranks on devices pulls pages of a prefill worker of one, answers as it, and ends with a rank.

The CPU takes the devices' place.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.cluster.fleet.test_lost_ranks import pid_of_other_rank
from tests.cluster.processes import PATIENCE_S, Client, running_cluster
from tests.cluster.reference import mismatches
from tests.cluster.requests.test_families import PAGES, answers_of, memory_of, saved_with_tokenizer
from twostroke.config import CacheConfig, ModelConfig, ScheduleConfig
from twostroke.kernels.cpu.variants import OVERRIDE, TORCH
from twostroke.rpc.v1 import control_pb2
from twostroke.worker.process import ENGINE_LOST


@pytest.mark.slow
async def test_streams_have_the_tokens_of_transformers_and_a_lost_rank_ends_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OVERRIDE, TORCH)  # the native kernel keeps pages in another order
    expected = saved_with_tokenizer("phi3", tmp_path, some=(33, 47, 100), growing=0)
    async with running_cluster(
        prefill=1,
        decode=1,
        model=ModelConfig(model=str(tmp_path), dtype="float32", decode_tp=2),
        model_dir=tmp_path,
        cache=CacheConfig(kv_cache_memory_bytes=memory_of(tmp_path, PAGES)),
        schedule=ScheduleConfig(max_num_seqs=4, local_prefill=False),
        policy="round-robin",
        decode_module="tests.cluster.device_decode_worker",
    ) as cluster:
        client = Client(cluster.grpc)
        for _ in ("pulled", "cached"):
            assert mismatches(expected, await answers_of(client, expected)) == []
        assert cluster.metric("decode-0", "twostroke_pull_bytes_total") > 0, "nothing was pulled"
        await client.close()
        os.kill(pid_of_other_rank(cluster, "decode-0"), signal.SIGKILL)
        worker = cluster.workers["decode-0"]
        assert await asyncio.wait_for(worker.process.wait(), PATIENCE_S) == ENGINE_LOST
        worker.state = control_pb2.WORKER_STATE_DEAD
