"""What goes wrong in the world, against real processes: a clear error with the right status, and nothing leaked."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest
import pytest_asyncio

from tests.cluster.processes import PATIENCE_S, TOKEN, Client, ProcessCluster, generate_request, running_cluster
from twostroke.config import CacheConfig, ListenConfig, ModelConfig, Role, RouterConfig, ScheduleConfig, WorkerConfig

PACED = ModelConfig(model="paced:prefill_tokens_per_s=4000,step_ms=10,vocab=2048,page_bytes=16384,max_model_len=8192")
POOL = CacheConfig(kv_cache_memory_bytes=256 * 16384)
ELSEWHERE = ScheduleConfig(local_prefill=False)
POLICY = "round-robin"
"""It always names the prefill worker: prompts are pulled, however busy the machine is and whatever that has taught."""
POOL_TOKENS = 256 * 16
module_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[ProcessCluster]:
    async with running_cluster(
        prefill=1, decode=1, model=PACED, cache=POOL, schedule=ELSEWHERE, policy=POLICY
    ) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster: ProcessCluster) -> AsyncIterator[Client]:
    client = Client(cluster.grpc)
    yield client
    await client.close()
    await cluster.assert_quiet()


async def refusal(client: Client, prompt: list[int], **options: object) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.tokens(prompt, **options)
    return caught.value


@module_loop
async def test_requests_that_can_never_fit_say_what_does(client: Client) -> None:
    too_long = await refusal(client, [5] * 8190, max_tokens=10)
    assert too_long.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "8192" in (too_long.details() or "") or str(POOL_TOKENS) in (too_long.details() or "")
    too_big = await refusal(client, [5] * (POOL_TOKENS - 5), max_tokens=10)
    assert too_big.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert str(POOL_TOKENS) in (too_big.details() or "")


@module_loop
@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ([], {}, "prompt"),
        ([2048], {}, "token"),
        ([1], {"temperature": -0.1}, "temperature"),
        ([1], {"top_p": 0.0}, "top_p"),
        ([1], {"top_p": 1.5}, "top_p"),
        ([1], {"n": 0}, "n "),
        ([1], {"stop": [str(number) for number in range(100)]}, "stop"),
        ([1], {"logprobs": 1000}, "logprobs"),
        ([1], {"prompt_logprobs": 21}, "prompt_logprobs"),
        ([1], {"max_tokens": 0}, "max_tokens"),
    ],
)
async def test_bad_fields_are_named(client: Client, prompt: list[int], options: dict[str, object], field: str) -> None:
    error = await refusal(client, prompt, **options)
    assert error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)
    assert field in (error.details() or "")


@module_loop
async def test_an_unknown_model_is_not_found_on_both_doors(cluster: ProcessCluster, client: Client) -> None:
    assert (await refusal(client, [1], model="gpt-9")).code() is grpc.StatusCode.NOT_FOUND
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"{cluster.http}/v1/completions", json={"model": "gpt-9", "prompt": "x"})
    assert answer.status_code == 404
    assert "gpt-9" in answer.json()["error"]["message"]


@module_loop
@pytest.mark.parametrize("body", [b"{", b"\xff\xfe", b"[]", b'{"model": 3}'])
async def test_malformed_bodies_are_400_in_openais_format(cluster: ProcessCluster, body: bytes) -> None:
    async with httpx.AsyncClient() as http:
        answer = await http.post(
            f"{cluster.http}/v1/chat/completions", content=body, headers={"content-type": "application/json"}
        )
    assert answer.status_code == 400
    assert set(answer.json()["error"]) >= {"message", "type", "param", "code"}


@module_loop
async def test_a_deadline_that_passes_is_never_a_normal_finish(client: Client) -> None:
    call = client.stub.Generate(generate_request([7, *range(5, 25)], max_tokens=500), timeout=0.5)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        assert not [response async for response in call if response.finish_reason]
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@module_loop
async def test_a_burst_with_a_common_prefix_pulls_it_once(cluster: ProcessCluster, client: Client) -> None:
    prefix = [31 + token % 1000 for token in range(640)]
    served = cluster.metric("prefill-0", "twostroke_served_pages_total")
    answers = await asyncio.gather(*(client.tokens([*prefix, 40 + n], max_tokens=4, seed=1) for n in range(8)))
    assert all(len(answer) == 4 for answer in answers)
    assert cluster.metric("prefill-0", "twostroke_served_pages_total") - served == 640 // 16


@module_loop
async def test_a_worker_with_another_fingerprint_is_refused_loudly(cluster: ProcessCluster, client: Client) -> None:
    await cluster.start_worker(
        Role.DECODE, "decode-odd", 1, cache=CacheConfig(block_size=32, kv_cache_memory_bytes=1 << 22)
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not ("block_size=32" in cluster.logs() and "decode-odd" in cluster.logs()):
                await asyncio.sleep(0.05)
        lines = [line for line in cluster.logs().splitlines() if "block_size=32" in line and "block_size=16" in line]
        assert any("decode-odd" in line for line in lines), "both values stand on one line"
        answers = await asyncio.gather(*(client.tokens([77, n], max_tokens=3) for n in range(6)))
        assert all(len(answer) == 3 for answer in answers)
        assert (await cluster.load("decode-odd")).pages_cached == 0
    finally:
        await cluster.kill("decode-odd")
        del cluster.workers["decode-odd"]
        cluster.publish()


def run_worker(config: WorkerConfig) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "decode_worker"]
    return subprocess.run(command, input=config.to_json(), capture_output=True, text=True, timeout=90, check=False)


def test_a_model_directory_that_lacks_a_file_names_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = WorkerConfig(role=Role.DECODE, worker_id="decode-0", model=ModelConfig(model=str(tmp_path)))
    ended = run_worker(config)
    assert ended.returncode == 2
    assert "tokenizer" in ended.stderr or "safetensors" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_pool_larger_than_memory_is_refused_in_bytes() -> None:
    config = WorkerConfig(
        role=Role.DECODE, worker_id="decode-0", model=PACED, cache=CacheConfig(kv_cache_memory_bytes=1 << 50)
    )
    ended = run_worker(config)
    assert ended.returncode == 2
    assert "--kv-cache-memory" in ended.stderr
    assert "bytes" in ended.stderr


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = RouterConfig(
            listen=ListenConfig(http_port=port, grpc_port=0), fleet_address="127.0.0.1:1", cluster_token=TOKEN
        )
        command = [sys.executable, "-m", "router"]
        ended = subprocess.run(command, input=config.to_json(), capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert str(port) in ended.stderr
