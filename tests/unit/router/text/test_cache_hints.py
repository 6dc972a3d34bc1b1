"""Cache hints: what `cache_control` of a request says about which of its blocks are kept, and how long."""

from __future__ import annotations

from typing import Any

import grpc.aio
import pytest

from router.text.prompts import ChatPrompt, diverging_chat
from twostroke.request import CacheHint
from twostroke.rpc.v1 import inference_pb2, inference_pb2_grpc

SYSTEM = {"role": "system", "content": "You are the voice of a ship, and you are brief."}
USER = {"role": "user", "content": "Are we there yet? " * 3}
FIVE = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}


async def chat_hints(frontend, body: dict[str, Any]) -> tuple[CacheHint, ...]:
    response = await frontend.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return frontend.dispatcher.requests[-1].hints


def blocks_of(text: str) -> int:
    """In blocks of 16 bytes, as the toy's tokens are bytes."""
    return len(text) // 16


async def test_a_message_with_cache_control_keeps_the_chat_up_to_it(frontend) -> None:
    hints = await chat_hints(frontend, {"messages": [{**SYSTEM, "cache_control": HOUR}, USER]})
    assert hints == (CacheHint(blocks_of(f"system: {SYSTEM['content']}\nuser: "), 3600.0),)
    part = {"type": "text", "text": SYSTEM["content"], "cache_control": FIVE}
    hints = await chat_hints(frontend, {"messages": [{"role": "system", "content": [part]}, USER]})
    assert hints == (CacheHint(blocks_of(f"system: {SYSTEM['content']}\nuser: "), 300.0),)


async def test_cache_control_of_the_request_keeps_all_of_its_prompt(frontend) -> None:
    prompt = f"system: {SYSTEM['content']}\nuser: {USER['content']}\nassistant: "
    (hint,) = await chat_hints(frontend, {"messages": [SYSTEM, USER], "cache_control": FIVE})
    assert hint == CacheHint(blocks_of(prompt), 300.0)
    for given in ("x" * 50, list(b"x" * 50)):
        response = await frontend.http.post("/v1/completions", json={"prompt": given, "cache_control": HOUR})
        assert response.status_code == 200
        assert frontend.dispatcher.requests[-1].hints == (CacheHint(3, 3600.0),)


async def test_several_hints_are_kept_each_for_its_time_and_the_last_four_count(frontend) -> None:
    messages = [{**SYSTEM, "cache_control": HOUR}, {**USER, "cache_control": FIVE}]
    first, second = await chat_hints(frontend, {"messages": messages})
    assert first.blocks < second.blocks
    assert (first.seconds, second.seconds) == (3600.0, 300.0)
    many = [{"role": "user", "content": str(rank), "cache_control": FIVE} for rank in range(9)]
    assert len(await chat_hints(frontend, {"messages": many})) == 4


async def test_a_request_without_cache_control_has_no_hint(frontend) -> None:
    assert await chat_hints(frontend, {"messages": [SYSTEM, {**USER, "cache_control": None}]}) == ()


async def test_hints_count_for_the_tenant_and_never_for_the_user_that_a_client_names(frontend) -> None:
    body = {"prompt": "x" * 50, "cache_control": HOUR, "user": "jo"}
    for headers, expected in (({}, ""), ({"X-Tenant-Id": "acme"}, "acme")):
        assert (await frontend.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
        sent = frontend.dispatcher.parents[-1]
        assert (sent.request.hint_tenant, sent.routing.tenant) == (expected, expected or "127.0.0.1")


async def test_grpc_has_the_same_hints(frontend) -> None:
    stub = inference_pb2_grpc.InferenceStub(frontend.channel)

    async def hints(request: inference_pb2.GenerateRequest) -> tuple[CacheHint, ...]:
        async for _ in stub.Generate(request):
            pass
        return frontend.dispatcher.requests[-1].hints

    keep = inference_pb2.CacheControl
    system = inference_pb2.ChatMessage(role="system", content=SYSTEM["content"], cache_control=keep(ttl_s=60))
    user = inference_pb2.ChatMessage(role="user", content=USER["content"])
    chat = inference_pb2.Chat(messages=[system, user])
    expected = blocks_of(f"system: {SYSTEM['content']}\nuser: ")
    assert await hints(inference_pb2.GenerateRequest(chat=chat)) == (CacheHint(expected, 60.0),)
    ids = inference_pb2.TokenIds(ids=[7] * 40)
    assert await hints(inference_pb2.GenerateRequest(token_ids=ids, cache_control=keep())) == (CacheHint(2, 300.0),)
    assert await hints(inference_pb2.GenerateRequest(text="x" * 40, cache_control=keep(ttl_s=9))) == (
        CacheHint(2, 9.0),
    )
    for seconds in (-1.0, float("nan"), 1e9):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await hints(inference_pb2.GenerateRequest(text="x", cache_control=keep(ttl_s=seconds)))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "cache_control.ttl_s" in refused.value.details()


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ("ephemeral", "cache_control"),
        (5, "cache_control"),
        ({}, "cache_control"),
        ({"type": "persistent"}, "cache_control"),
        ({"type": ["ephemeral"]}, "cache_control"),
        ({"type": "ephemeral", "ttl": 300}, "cache_control.ttl"),
        ({"type": "ephemeral", "ttl": "5 minutes"}, "cache_control.ttl"),
        ({"type": "ephemeral", "ttl": "-5m"}, "cache_control.ttl"),
        ({"type": "ephemeral", "ttl": "0s"}, "cache_control.ttl"),
        ({"type": "ephemeral", "ttl": "2d"}, "cache_control.ttl"),
        ({"type": "ephemeral", "ttl": "9" * 400 + "s"}, "cache_control.ttl"),
    ],
)
async def test_a_cache_control_that_says_nothing_is_refused_naming_the_field(app, value: Any, field: str) -> None:
    dispatcher, http = app
    for path, body in (
        ("/v1/completions", {"prompt": "a", "cache_control": value}),
        ("/v1/chat/completions", {"messages": [USER], "cache_control": value}),
        ("/v1/chat/completions", {"messages": [{**USER, "cache_control": value}]}),
    ):
        response = await http.post(path, json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"].endswith(field)
    assert not dispatcher.requests


def test_what_goes_on_otherwise_differs_in_the_next_message_only() -> None:
    chat = ChatPrompt(messages=(SYSTEM, {"role": "user", "content": "All is well"}))
    begun = diverging_chat(chat, 1)
    assert begun.messages == (SYSTEM, {"role": "user", "content": "7"})
    assert diverging_chat(chat, 2).messages == (*chat.messages, {"role": "assistant", "content": "A"})
