"""`twostroke profile` of real processes under load: what it shows is what the workers did."""

from __future__ import annotations

import asyncio
import gzip
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from cluster.clients.admin_access import AdminAccess
from cluster.profiles.collecting import collect
from tests.cluster.processes import PATIENCE_S, TOKEN, ProcessCluster, generate_request, running_cluster
from tests.unit.cluster.profiles.profiles import check_events, named
from tools.cli import main
from twostroke.base.credentials import TOKEN_VARIABLE
from twostroke.config import ModelConfig, ScheduleConfig
from twostroke.rpc.v1 import inference_pb2_grpc

PACED = ModelConfig(model="paced:step_ms=4,prefill_tokens_per_s=20000,max_model_len=4096", served_model_name="tiny")
BY_64 = ScheduleConfig(max_num_seqs=8, max_num_batched_tokens=64, local_prefill=False)


@pytest.fixture(autouse=True)
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    monkeypatch.setenv(TOKEN_VARIABLE, str(tmp_path / "token"))


@asynccontextmanager
async def loaded(cluster: ProcessCluster) -> AsyncIterator[None]:
    """Two clients that ask without a pause."""

    async def client(number: int) -> None:
        async with grpc.aio.insecure_channel(cluster.grpc) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            for turn in range(10**6):
                prompt = [2 + (number * 7919 + turn * 31 + position) % 900 for position in range(150)]
                async for _ in stub.Generate(generate_request(prompt, max_tokens=20), timeout=PATIENCE_S):
                    pass

    clients = [asyncio.create_task(client(number)) for number in range(2)]
    try:
        yield
    finally:
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


async def profiled(cluster: ProcessCluster, path: Path, seconds: str = "1") -> dict[str, Any]:
    status = await asyncio.to_thread(main, ["profile", seconds, "--out", str(path), "--admin", cluster.admin])
    assert status == 0
    trace = read(path)
    check_events(trace["traceEvents"])
    return trace


def read(path: Path) -> dict[str, Any]:
    trace: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_text())
    return trace


def seconds_of(events: list[dict[str, Any]], name: str, pid: int) -> float:
    return sum(event["dur"] for event in named(events, name) if event["pid"] == pid) / 1e6


def pids_of(events: list[dict[str, Any]]) -> dict[str, int]:
    return {
        event["args"]["name"].partition(" ")[0].partition("-")[0]: event["pid"]
        for event in events
        if event["name"] == "process_name"
    }


async def test_a_profile_shows_the_steps_that_workers_ran_and_the_requests_they_were_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running_cluster(prefill=1, decode=1, model=PACED, schedule=BY_64) as cluster, loaded(cluster):
        before_s = cluster.metric("decode-0", "twostroke_step_seconds_sum")
        events = (await profiled(cluster, tmp_path / "trace.json.gz"))["traceEvents"]
        counted_s = cluster.metric("decode-0", "twostroke_step_seconds_sum") - before_s
        pids = pids_of(events)
        assert list(pids) == ["router", "prefill", "decode"]
        shown_s = seconds_of(events, "step", pids["decode"])
        assert 0 < shown_s <= 1.1 * counted_s, "more than was counted over a longer time"
        for name, process in {"request": "router", "wait": "router", "prefill": "prefill"}.items():
            assert seconds_of(events, name, pids[process]) > 0, name
        for name in ("attempt", "queue", "pull", "admit", "plan", "build batch", "send", "update"):
            assert seconds_of(events, name, pids["decode"]) > 0, name
        assert {event["args"]["transport"] for event in named(events, "pull")} == {"shm"}
        assert "decode-0: " in capsys.readouterr().out


async def test_a_profile_tells_who_died_meanwhile_and_ends_with_its_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running_cluster(prefill=1, decode=2, model=PACED, schedule=BY_64) as cluster:
        asking = asyncio.create_task(profiled(cluster, tmp_path / "trace.json", "2"))
        await asyncio.sleep(1)
        await cluster.kill("decode-1", signal.SIGKILL)
        assert await asyncio.to_thread(main, ["profile", "1", "--admin", cluster.admin]) == 2
        assert "a profile of this process is being recorded" in capsys.readouterr().err
        trace = await asking
        assert trace["otherData"]["decode-1"]["failure"]
        assert not trace["otherData"]["decode-0"]["failure"]
        assert await asyncio.to_thread(main, ["profile", "0", "--admin", cluster.admin]) == 2
        assert "seconds must be above 0" in capsys.readouterr().err
        await profiled(cluster, tmp_path / "again.json", "0.1")


async def test_of_several_routers_one_asks_the_workers() -> None:
    async with running_cluster(prefill=1, decode=1, routers=2, model=PACED, schedule=BY_64) as cluster:
        admins = tuple(router.addresses.admin for router in cluster.routers.values())
        found = await asyncio.to_thread(collect, AdminAccess(admins, TOKEN), 0.2)
        assert sorted(profile.about.role for profile in found) == ["decode", "prefill", "router", "router"]
        assert not any(profile.failure for profile in found)


@pytest.mark.slow
async def test_the_kernels_of_a_real_model_fill_the_forward_passes_that_a_profile_shows(
    tmp_path: Path, smollm2_dir: Path
) -> None:
    model = ModelConfig(model=str(smollm2_dir), dtype="bfloat16")
    async with (
        running_cluster(
            prefill=1,
            decode=1,
            model=model,
            model_dir=smollm2_dir,
            schedule=BY_64,
            policy="random",  # prompts are computed at the prefill worker, however short
        ) as cluster,
        loaded(cluster),
    ):
        trace = await profiled(cluster, tmp_path / "trace.json", "1.5")
    events, pids = trace["traceEvents"], pids_of(trace["traceEvents"])
    for process in ("prefill", "decode"):
        steps_s, forwards_s = (seconds_of(events, name, pids[process]) for name in ("step", "forward"))
        kernels = [event for event in events if event.get("cat") == "kernel" and event["pid"] == pids[process]]
        kernels_s = sum(event["dur"] for event in kernels) / 1e6
        assert 0.5 * steps_s < forwards_s <= steps_s
        assert 0.8 * forwards_s < kernels_s <= forwards_s
        least_s = sum(event["args"]["share_of_limit"] * event["dur"] for event in kernels) / 1e6
        assert 0 < least_s <= 1.5 * kernels_s, "faster than what this machine was seen to do, but for small weights"
    assert trace["otherData"]["decode-0"]["limit_read_gb_per_s"] > 0
    heads = {event["pid"] for event in named(events, "head")}
    assert heads == {pids["decode"]}, "a prefill worker samples nothing"
