"""Whole runs against small servers on real sockets: counts and failures come out as the server made them."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from tools.bench import run
from tools.bench.load import Speller
from tools.bench.measure import Report
from tools.bench.session import measure, plan_of
from twostroke.base.errors import ConfigError, PeerLost


async def report_of(options: Any) -> Report:
    return await measure(options, plan_of(options))


async def test_every_streamed_token_of_every_request_is_counted(openai_server: Any, options: Any) -> None:
    flags = ("--num-requests", "12", "--prompt-tokens", "20", "--output-tokens", "5", "--concurrency", "4")
    report = await report_of(options("--url", openai_server.url, *flags))
    assert (report.completed, report.failed, report.errors) == (12, 0, ())
    assert (report.prompt_tokens, report.output_tokens, report.cached_tokens) == (240, 60, 36)
    assert report.token_events == 60
    assert report.ttft_s is not None
    assert report.inter_token_s is not None
    assert report.end_to_end_s is not None
    assert (report.ttft_s.count, report.inter_token_s.count) == (12, 48)
    assert 0 < report.ttft_s.p50 < report.end_to_end_s.p50
    assert report.ttft_s.mean + 4 * report.inter_token_s.mean <= report.end_to_end_s.mean
    assert not [note for note in report.notes if "core" not in note]


async def test_prompts_go_out_as_the_planned_token_ids_with_eos_ignored(openai_server: Any, options: Any) -> None:
    chosen = options("--url", openai_server.url, "--num-requests", "3", "--prompt-tokens", "9", "--output-tokens", "2")
    await report_of(chosen)
    speller = Speller(30000, 0)
    sent = openai_server.bodies
    assert [body["prompt"] for body in sent] == [speller.token_ids(each.prompt) for each in plan_of(chosen)]
    assert all(
        (body["max_tokens"], body["ignore_eos"], body["stream"], body["model"]) == (2, True, True, "steady")
        for body in sent
    )


async def test_fixed_concurrency_keeps_exactly_that_many_open(openai_server: Any, options: Any) -> None:
    flags = ("--num-requests", "20", "--prompt-tokens", "8", "--output-tokens", "3", "--concurrency", "5")
    report = await report_of(options("--url", openai_server.url, *flags))
    assert (openai_server.peak_open, report.peak_open_requests) == (5, 5)
    assert report.send_lag_s is None


async def test_an_open_loop_sends_everything_before_the_first_answer(openai_server: Any, options: Any) -> None:
    openai_server.may_answer.clear()
    flags = ("--num-requests", "15", "--prompt-tokens", "8", "--output-tokens", "2", "--rate", "1000")
    running = asyncio.create_task(report_of(options("--url", openai_server.url, *flags)))
    async with asyncio.timeout(60), openai_server.opened:
        await openai_server.opened.wait_for(lambda: openai_server.open == 15)
    openai_server.may_answer.set()
    report = await running
    assert (report.completed, report.peak_open_requests) == (15, 15)
    assert report.send_lag_s is not None
    assert report.send_lag_s.count == 15
    assert report.send_lag_s.p50 >= 0


@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [
        ("reject", "http 429", "queue full"),
        ("breaks", "stream server_error", "worker died"),
        ("cut", "incomplete", "without a finish reason"),
        ("silent", "timeout", "after 0.3 s"),
    ],
)
async def test_failures_are_counted_by_their_cause(
    openai_server: Any, options: Any, model: str, kind: str, message: str
) -> None:
    flags = ("--num-requests", "6", "--prompt-tokens", "8", "--output-tokens", "4", "--concurrency", "6")
    timeout = "0.3" if model == "silent" else "60"
    report = await report_of(
        options("--url", openai_server.url, "--model", f"steady|{model}", "--timeout", timeout, *flags)
    )
    assert (report.completed, report.failed) == (3, 3)
    assert [(error.kind, error.count) for error in report.errors] == [(kind, 3)]
    assert message in report.errors[0].example
    assert report.output_tokens == 12


async def test_two_tokens_in_an_event_are_counted_by_usage_and_said(openai_server: Any, options: Any) -> None:
    flags = ("--num-requests", "4", "--prompt-tokens", "8", "--output-tokens", "8", "--model", "double")
    report = await report_of(options("--url", openai_server.url, *flags))
    assert (report.output_tokens, report.token_events) == (32, 16)
    assert any("2.00 tokens into an event" in note for note in report.notes)


async def test_a_server_without_usage_is_counted_by_events_and_said(openai_server: Any, options: Any) -> None:
    flags = ("--num-requests", "2", "--prompt-tokens", "8", "--output-tokens", "3", "--model", "no-usage")
    report = await report_of(options("--url", openai_server.url, *flags))
    assert (report.prompt_tokens, report.output_tokens, report.cached_tokens) == (16, 6, None)
    assert any("no usage" in note for note in report.notes)


async def test_chat_sends_words_and_does_not_count_the_role_as_a_token(openai_server: Any, options: Any) -> None:
    flags = ("--num-requests", "2", "--prompt-tokens", "8", "--output-tokens", "3", "--chat", "--api-key", "k")
    report = await report_of(options("--url", openai_server.url, *flags))
    assert (report.prompt_tokens, report.output_tokens, report.token_events) == (14, 6, 6)
    assert len(openai_server.bodies[0]["messages"][0]["content"].split()) == 8
    assert openai_server.headers[0]["authorization"] == "Bearer k"


async def test_without_streaming_only_the_end_is_measured(openai_server: Any, options: Any) -> None:
    flags = ("--num-requests", "3", "--prompt-tokens", "8", "--output-tokens", "4", "--no-stream")
    report = await report_of(options("--url", openai_server.url, *flags))
    assert (report.completed, report.output_tokens) == (3, 12)
    assert report.ttft_s is report.inter_token_s is report.tpot_s is None
    assert report.end_to_end_s is not None


async def test_warmup_requests_are_sent_but_not_measured(openai_server: Any, options: Any) -> None:
    flags = ("--num-requests", "4", "--prompt-tokens", "8", "--output-tokens", "2", "--warmup", "3")
    report = await report_of(options("--url", openai_server.url, *flags))
    assert (len(openai_server.bodies), report.requests) == (7, 4)


async def test_a_trace_is_replayed_with_its_lengths(openai_server: Any, options: Any, tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1024, "output_length": 40, "hash_ids": [0, 1]},
        {"timestamp": 3000, "input_length": 600, "output_length": 20, "hash_ids": [0, 2]},
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    flags = ("--trace", str(trace), "--trace-scale", "0.01", "--trace-length-scale", "0.1")
    report = await report_of(options("--url", openai_server.url, *flags))
    first, second = (body["prompt"] for body in openai_server.bodies)
    assert (len(first), len(second), report.output_tokens) == (102, 60, 6)
    assert first[:51] == second[:51]
    assert first[51] != second[51]


async def test_run_prints_a_table_writes_json_and_returns_0(
    openai_server: Any, arguments: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.json"
    flags = ("--num-requests", "4", "--prompt-tokens", "8", "--output-tokens", "3", "--json", str(out))
    flags += ("--model", "steady|reject", "--api-key", "secret")
    assert await asyncio.to_thread(run, arguments("--url", openai_server.url, *flags)) == 0
    printed = capsys.readouterr().out
    assert "inter-token latency" in printed
    assert "2 failed: http 429" in printed
    report = json.loads(out.read_text())
    assert (report["completed"], report["failed"], report["output_tokens"]) == (2, 2, 6)
    assert report["errors"][0]["kind"] == "http 429"
    assert set(report["ttft_s"]) == {"count", "mean", "p50", "p90", "p99", "max"}
    assert report["options"]["prompt_tokens"] == 8
    assert "secret" not in out.read_text()


async def test_json_on_standard_output_is_alone_there(
    openai_server: Any, arguments: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--num-requests", "2", "--prompt-tokens", "8", "--output-tokens", "2", "--json", "-")
    await asyncio.to_thread(run, arguments("--url", openai_server.url, *flags))
    assert json.loads(capsys.readouterr().out)["completed"] == 2


async def test_run_returns_1_and_a_hint_when_every_request_is_refused(
    openai_server: Any, arguments: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--num-requests", "2", "--prompt-tokens", "8", "--model", "no-ids")
    assert await asyncio.to_thread(run, arguments("--url", openai_server.url, *flags)) == 1
    printed = capsys.readouterr().out
    assert "prompt must be a string" in printed
    assert "--text" in printed


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_a_server_that_is_not_there_is_named(arguments: Any) -> None:
    port = free_port()
    with pytest.raises(PeerLost, match=f"no server at http://127.0.0.1:{port}"):
        run(arguments("--url", f"http://127.0.0.1:{port}"))


def test_run_returns_1_when_no_request_gets_through(arguments: Any, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--model", "m", "--num-requests", "3", "--url", f"http://127.0.0.1:{free_port()}")
    assert run(arguments(*flags)) == 1
    assert "3 failed: connection" in capsys.readouterr().out


def test_a_malformed_trace_is_refused_before_anything_is_sent(arguments: Any, tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text('{"timestamp": 0}\n')
    with pytest.raises(ConfigError, match=r"trace\.jsonl:1: input_length is missing"):
        run(arguments("--trace", str(tmp_path / "trace.jsonl")))


async def test_grpc_tokens_are_counted_by_their_ids_and_drawn_from_the_served_vocabulary(
    grpc_server: Any, options: Any
) -> None:
    flags = ("--num-requests", "8", "--prompt-tokens", "20", "--output-tokens", "5", "--concurrency", "4")
    report = await report_of(options("--grpc", grpc_server.address, *flags))
    assert (report.completed, report.failed) == (8, 0)
    assert (report.prompt_tokens, report.output_tokens, report.cached_tokens) == (160, 40, 40)
    assert report.token_events == 40
    assert report.inter_token_s is not None
    assert report.inter_token_s.count == 32
    assert all(75 <= token < 300 for request in grpc_server.requests for token in request.token_ids.ids)
    assert all(request.stop.ignore_eos for request in grpc_server.requests)


@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [
        ("reject", "grpc RESOURCE_EXHAUSTED", "queue full"),
        ("cut", "incomplete", "without a finish reason"),
        ("silent", "timeout", "after 0.3 s"),
    ],
)
async def test_grpc_failures_are_counted_by_their_cause(
    grpc_server: Any, options: Any, model: str, kind: str, message: str
) -> None:
    timeout = "0.3" if model == "silent" else "60"
    flags = ("--num-requests", "3", "--concurrency", "3", "--prompt-tokens", "8", "--output-tokens", "4")
    report = await report_of(options("--grpc", grpc_server.address, "--model", model, "--timeout", timeout, *flags))
    assert (report.completed, report.failed) == (0, 3)
    assert [(error.kind, error.count) for error in report.errors] == [(kind, 3)]
    assert message in report.errors[0].example


async def test_grpc_sends_words_or_a_chat_on_request(grpc_server: Any, options: Any) -> None:
    flags = ("--num-requests", "1", "--prompt-tokens", "8", "--output-tokens", "1")
    for form in ("--text", "--chat"):
        await report_of(options("--grpc", grpc_server.address, form, *flags))
    text, chat = grpc_server.requests
    assert len(text.text.split()) == 8
    assert len(chat.chat.messages[0].content.split()) == 8


async def test_a_grpc_server_that_is_not_there_is_named(options: Any) -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(PeerLost, match=f"no server at {address}"):
        await report_of(options("--grpc", address))
