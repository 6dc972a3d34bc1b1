"""A stream without tokens for a while, as where it recovers, tells a resuming client that somebody works for it."""

from __future__ import annotations

import asyncio

import pytest

from router.requests import resume
from tests.unit.router.conftest import Frontend
from twostroke.rpc.v1 import inference_pb2, inference_pb2_grpc

BODY = {"model": "toy", "prompt": "a", "max_tokens": 5, "stream": True}
RESUMABLE = {"X-Resumable-Stream": "true"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "PULSE_S", 0.02)


async def lines_while_it_stalls(frontend: Frontend, after_tokens: int, headers: dict[str, str]) -> list[str]:
    """What came of a stream that stands still after so many tokens, and is aborted some time later."""
    frontend.dispatcher.stalls, frontend.dispatcher.failure_after = True, after_tokens

    async def abort() -> None:
        async with asyncio.timeout(60):
            await frontend.dispatcher.stalled.wait()
        await asyncio.sleep(0.3)
        for name in list(frontend.dispatcher.open_ids):
            await frontend.dispatcher.abort(name)

    aborting = asyncio.create_task(abort())
    async with frontend.http.stream("POST", "/v1/completions", json=BODY, headers=headers) as response:
        lines = [line async for line in response.aiter_lines()]
    await aborting
    return lines


async def test_a_stream_that_stands_still_beats_for_a_client_that_would_go_on_elsewhere(frontend: Frontend) -> None:
    lines = await lines_while_it_stalls(frontend, 2, RESUMABLE)
    first = next(at for at, line in enumerate(lines) if line.startswith(":"))
    assert sum(line.startswith("data:") for line in lines[:first]) == 2
    assert 3 <= lines.count(": going on") <= 20


async def test_a_router_that_knows_of_no_worker_lets_its_clients_leave(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(frontend.dispatcher), "knows_decode_worker", False)
    lines = await lines_while_it_stalls(frontend, 2, RESUMABLE)
    assert sum(line.startswith("data:") for line in lines) >= 2
    assert not [line for line in lines if line.startswith(":")]


async def test_a_router_that_takes_no_new_requests_still_beats_for_those_that_it_has(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(frontend.dispatcher), "is_ready", False)
    assert ": going on" in await lines_while_it_stalls(frontend, 2, RESUMABLE)


async def test_who_has_not_asked_to_go_on_elsewhere_gets_messages_alone(frontend: Frontend) -> None:
    lines = await lines_while_it_stalls(frontend, 2, {})
    assert not [line for line in lines if line.startswith(":")]


async def test_a_first_token_is_waited_for_in_silence_so_that_a_failure_has_its_status(frontend: Frontend) -> None:
    lines = await lines_while_it_stalls(frontend, 0, RESUMABLE)
    assert not [line for line in lines if line.startswith(":")]


async def test_nobody_asks_for_workers_where_no_sign_of_life_is_due(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer takes a look at every worker. A request that begins asks once."""
    asked: list[object] = []
    for name in ("is_ready", "knows_decode_worker"):
        monkeypatch.setattr(type(frontend.dispatcher), name, property(lambda core: asked.append(core) or True))
    await lines_while_it_stalls(frontend, 0, RESUMABLE)
    silent = len(asked)
    await lines_while_it_stalls(frontend, 2, RESUMABLE)
    assert len(asked) - silent > 2 * silent


async def test_a_resumed_stream_beats_before_its_first_token(frontend: Frontend) -> None:
    whole = await frontend.http.post("/v1/completions", json=BODY, headers=RESUMABLE)
    token = next(line for line in whole.text.splitlines() if line.startswith("id: ")).removeprefix("id: ")
    lines = await lines_while_it_stalls(frontend, 0, {"Last-Event-ID": token})
    assert lines.count(": going on") >= 3


@pytest.mark.parametrize("after_tokens", [0, 2])
async def test_over_grpc_it_is_a_message_with_nothing_but_the_name(frontend: Frontend, after_tokens: int) -> None:
    frontend.dispatcher.stalls, frontend.dispatcher.failure_after = True, after_tokens
    stub = inference_pb2_grpc.InferenceStub(frontend.channel)
    request = inference_pb2.GenerateRequest(text="a", stop=inference_pb2.StopOptions(max_tokens=5))
    call = stub.Generate(request)
    heard: list[inference_pb2.GenerateResponse] = []
    for _ in range(after_tokens and after_tokens + 3):
        message = await call.read()
        assert isinstance(message, inference_pb2.GenerateResponse)
        heard.append(message)
    assert [bool(message.resume_token) for message in heard] == [True] * after_tokens + [False] * len(
        heard[after_tokens:]
    )
    for beat in heard[after_tokens:]:
        assert beat == inference_pb2.GenerateResponse(request_id=heard[0].request_id)
    if not after_tokens:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(call.read(), 0.2)
    call.cancel()
    await frontend.dispatcher.all_closed.wait()
