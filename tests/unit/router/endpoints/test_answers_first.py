"""An answer is reached by one look at a table, and runs in the task of its connection."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from router.endpoints.app import AnswersFirst
from router.requests.work import Work
from tests.inline_preparer import InlinePreparer
from tests.unit.router.conftest import Frontend


async def others(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("another")(scope, receive, send)


async def answer(request: Request) -> PlainTextResponse:
    return PlainTextResponse("answer")


@pytest.mark.parametrize(
    ("method", "path", "said"),
    [
        ("POST", "/v1/chat", "answer"),
        ("GET", "/v1/chat", "another"),
        ("POST", "/v1/chat/", "another"),
        ("POST", "/v2/m/infer", "another"),
        ("POST", "/v2/{model}/infer", "another"),
    ],
)
async def test_a_post_to_a_path_of_the_table_is_answered_and_all_else_is_left(
    method: str, path: str, said: str
) -> None:
    app = AnswersFirst({"/v1/chat": answer, "/v2/{model}/infer": answer}, others)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://toy") as http:
        assert (await http.request(method, path)).text == said


async def test_a_streamed_answer_needs_no_task_but_that_of_its_connection(frontend: Frontend) -> None:
    names: list[str] = []

    def counted(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **named: Any) -> asyncio.Task[Any]:
        names.append(getattr(work, "__qualname__", ""))
        return asyncio.Task(work, loop=loop, **named)

    asked = {"prompt": "a", "stream": True, "max_tokens": 5}
    await frontend.http.post("/v1/completions", json=asked)
    loop = asyncio.get_running_loop()
    loop.set_task_factory(counted)
    try:
        assert "[DONE]" in (await frontend.http.post("/v1/completions", json=asked)).text
    finally:
        loop.set_task_factory(None)
    assert [name for name in names if name.startswith("Exchange")] == ["Exchange.run"]
    assert not [name for name in names if "answer" in name or "Answer" in name]


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens"]
)
async def test_a_tenants_name_is_checked_before_a_request_is_prepared(
    frontend: Frontend, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[Work] = []
    monkeypatch.setattr(InlinePreparer, "prepare", lambda preparer, work, tenant: prepared.append(work))
    answer = await frontend.http.post(path, json={"prompt": "a"}, headers={"x-tenant-id": "n" * 60_000})
    assert answer.status_code == 400
    assert "x-tenant-id" in answer.text
    assert not prepared
