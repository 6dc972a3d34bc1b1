"""One trace per request over real processes: as a collector receives it, and as `twostroke trace` shows it."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
from pathlib import Path

import grpc.aio
import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.cluster.collector import Collector, collecting, values_of
from tests.cluster.processes import PATIENCE_S, SHOWN, TOKEN, ProcessCluster, generate_request, running_cluster
from tools.cli import main
from twostroke.base.credentials import TOKEN_VARIABLE
from twostroke.config import ModelConfig, ScheduleConfig, TracingConfig
from twostroke.rpc.v1 import control_pb2, control_pb2_grpc, inference_pb2_grpc

PACED = ModelConfig(model="paced:step_ms=4,prefill_tokens_per_s=20000,max_model_len=4096", served_model_name="tiny")
BY_64 = ScheduleConfig(max_num_seqs=8, max_num_batched_tokens=64, local_prefill=False)
PROMPT_BLOCKS, BLOCK = 20, 16
PROMPT = list(range(1, PROMPT_BLOCKS * BLOCK + 6))
CLIENT_TRACE, CLIENT_SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TREE = {
    "prepare": "request",
    "answer": "request",
    "route": "answer",
    "wait": "answer",
    "attempt": "answer",
    "queue": ("attempt", "prefill"),
    "pull": "attempt",
    "prefill": "pull",
    "chunk": ("attempt", "prefill"),
    "decode": "attempt",
}


async def test_a_request_is_one_trace_over_all_processes_and_its_waterfall_needs_no_collector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    monkeypatch.setenv(TOKEN_VARIABLE, str(tmp_path / "token"))
    async with (
        collecting() as collector,
        running_cluster(
            prefill=1,
            decode=2,
            model=PACED,
            schedule=BY_64,
            policy="round-robin",
            tracing=TracingConfig(otlp_endpoint=collector.endpoint),
        ) as cluster,
    ):
        await ask(cluster, "followed", sampled=True)
        await check_trace(collector, await page_bytes(cluster))
        await ask(cluster, "not sampled", sampled=False)
        answer_id = await ask_over_http(cluster, "over http")

        async def shown(*arguments: str) -> tuple[int, str, str]:
            status = await asyncio.to_thread(main, ["trace", *arguments, "--admin", cluster.admin])
            said = capsys.readouterr()
            return status, said.out, said.err

        status, out, _ = await shown("not sampled")
        assert status == 0
        for name in TREE:
            assert name in out, f"{name} is missing in\n{out}"
        assert "transport=shm" in out
        assert "5 chunks" in out
        assert answer_id == "cmpl-over http"
        status, out, _ = await shown(answer_id)
        assert status == 0
        assert "stream over http~" in out
        await survive_a_dead_worker(cluster, "survivor")
        _, out, _ = await shown("survivor", "--json")
        spans = json.loads(out)["spans"]
        answer = next(span for span in spans if span["name"] == "answer")
        assert [event["name"] for event in answer["events"]] == ["first token", "reopened"]
        assert answer["attributes"]["attempts"] == sum(span["name"] == "route" for span in spans) == 2
        status, out, err = await shown("nobody")
        assert (status, out) == (2, "")
        assert err == (
            "twostroke: no router or worker knows a request 'nobody'; its id is the `id` of its answer, and in the "
            "header x-request-id of its response\n"
        )
        await collector.until(lambda spans: any(span.name == "request" and not span.parent_span_id for span in spans))
        sampled_requests = [span for span in collector.spans if span.name == "request"]
        assert {values_of(span.attributes)["request_id"] for span in sampled_requests} >= {"followed", "over http"}
        assert "not sampled" not in {values_of(span.attributes)["request_id"] for span in sampled_requests}


async def check_trace(collector: Collector, page_bytes: int) -> None:
    await collector.until(lambda spans: {"request", *TREE} <= {span.name for span in spans})
    spans = {span.span_id: span for span in collector.spans}
    assert {span.trace_id.hex() for span in spans.values()} == {CLIENT_TRACE}
    root = next(span for span in spans.values() if span.name == "request")
    assert root.parent_span_id.hex() == CLIENT_SPAN
    for span in spans.values():
        if span is root:
            continue
        parent = spans[span.parent_span_id]
        assert parent.name in TREE[span.name], f"{span.name} is part of {parent.name}"
        assert parent.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano, span.name
        assert span.end_time_unix_nano <= parent.end_time_unix_nano, f"{span.name} ends after its {parent.name}"
    check_facts({name: one(list(spans.values()), name) for name in ("route", "pull", "prefill", "decode")}, page_bytes)
    assert {collector.services[span.span_id] for span in spans.values() if span.name == "prefill"} == {"prefill-0"}
    chunks = [span for span in spans.values() if span.name == "chunk"]
    built = [c for c in chunks if spans[c.parent_span_id].name == "prefill"]
    assert sum(int(values_of(c.attributes)["tokens"]) for c in built) == PROMPT_BLOCKS * BLOCK
    assert len(built) == PROMPT_BLOCKS * BLOCK / 64
    assert all(a.end_time_unix_nano <= b.start_time_unix_nano for a, b in itertools.pairwise(built))


def check_facts(facts: dict[str, dict[str, object]], page_bytes: int) -> None:
    assert facts["route"]["source"] == facts["pull"]["source"] == "prefill-0"
    assert float(facts["route"]["first_token_s"]) > 0
    assert facts["pull"]["pages"] == facts["pull"]["computed_pages"] == PROMPT_BLOCKS
    assert facts["pull"]["bytes"] == PROMPT_BLOCKS * page_bytes
    assert facts["prefill"]["computed_tokens"] == PROMPT_BLOCKS * BLOCK
    assert (facts["decode"]["tokens"], facts["decode"]["steps"], facts["decode"]["preemptions"]) == (5, 5, 0)


def one(spans: list[Span], name: str) -> dict[str, object]:
    (span,) = (span for span in spans if span.name == name)
    return values_of(span.attributes)


async def ask(cluster: ProcessCluster, request_id: str, *, sampled: bool) -> None:
    header = f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-0{int(sampled)}"
    prompt = PROMPT if sampled else PROMPT[::-1]
    async with grpc.aio.insecure_channel(cluster.grpc) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(
            generate_request(prompt, max_tokens=5, request_id=request_id),
            metadata=(("traceparent", header),),
            timeout=PATIENCE_S,
        )
        assert len([token async for message in call for token in message.token_ids]) == 5


async def ask_over_http(cluster: ProcessCluster, request_id: str) -> str:
    """The answer's id. The request has no trace of its own, so it begins one."""
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        answer = await client.post(
            f"{cluster.http}/v1/completions",
            json={"model": "tiny", "prompt": PROMPT[7:], "max_tokens": 3},
            headers={"x-request-id": request_id},
        )
    assert answer.status_code == 200
    return str(answer.json()["id"])


async def survive_a_dead_worker(cluster: ProcessCluster, request_id: str) -> None:
    async with grpc.aio.insecure_channel(cluster.grpc) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(
            generate_request(PROMPT[11:], max_tokens=40, request_id=request_id), timeout=PATIENCE_S
        )
        tokens = 0
        async for message in call:
            tokens += len(message.token_ids)
            if tokens == 3:
                await cluster.kill(await busy_one(cluster), signal.SIGKILL)
        assert tokens == 40


async def page_bytes(cluster: ProcessCluster) -> int:
    async with grpc.aio.insecure_channel(cluster.admin) as channel:
        control = control_pb2_grpc.ControlStub(channel)
        return (await control.GetModelInfo(control_pb2.GetModelInfoRequest(), metadata=SHOWN)).page_bytes


async def busy_one(cluster: ProcessCluster) -> str:
    for worker in ("decode-0", "decode-1"):
        if (await cluster.load(worker)).running:
            return worker
    raise AssertionError("nobody decodes")
