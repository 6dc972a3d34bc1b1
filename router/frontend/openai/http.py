"""One response over HTTP: a JSON body, or server-sent events with every token its own event; it ends with its
client."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from router.frontend.http.exchange import WRITE_PART
from router.frontend.openai.reply import Reply, encoded, error_body
from router.frontend.params import ClientRequest
from router.frontend.request_handler import RequestHandler, TextEvent
from router.frontend.resume import Pulse
from twostroke.errors import Cancelled, Draining, InvalidApiKey, Overloaded, ServeError, without_frames

Value = TypeVar("Value")

_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

SHOULD_RETRY_HEADER = "x-should-retry"
"""Header by which OpenAI's clients decide. Without it they retry every status of 408, 409, 429 or from 500 on."""
LONGEST_RETRY_S = 60.0
"""Longest wait of OpenAI's clients. Where a retry is due later they try sooner, and in vain."""


def error_response(error: ServeError) -> Response:
    without_frames(error)
    headers = {SHOULD_RETRY_HEADER: "true" if _is_worth_retrying(error) else "false"}
    if error.retryable:
        headers["retry-after"] = str(_retry_after_s(error))
    if isinstance(error, InvalidApiKey):
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error_body(error), status_code=error.http_status, headers=headers)


def _is_worth_retrying(error: ServeError) -> bool:
    predicted_s = error.retry_after_s if isinstance(error, Overloaded) else None
    return error.retryable and (predicted_s is None or predicted_s <= LONGEST_RETRY_S)


def _retry_after_s(error: ServeError) -> int:
    """Returns whole seconds, as HTTP wants them."""
    predicted_s = error.retry_after_s if isinstance(error, Overloaded) else None
    return max(1, math.ceil(predicted_s or 0.0))


async def unless_gone(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """Returns what `work` returns. It is cancelled if the client goes away, which raises Cancelled."""
    worker = await _watched(_outcome(work), request.receive)
    if worker.cancelled():
        raise Cancelled("the client went away before its request was read")
    value, error = worker.result()
    if error is not None:
        raise error
    return value


async def _outcome(work: Coroutine[Any, Any, Any]) -> tuple[Any, ServeError | None]:
    """Returns the error instead of raising it, because a group of tasks would wrap it."""
    try:
        return await work, None
    except ServeError as error:
        return None, error


class AnswerResponse(Response):
    """Runs the request while its client listens.

    Status and headers wait for the first event, so that a request that fails before its first token gets the status of
    its failure.
    """

    def __init__(self, handler: RequestHandler, request: ClientRequest, reply: Reply, *, stream: bool) -> None:
        super().__init__()
        self._handler = handler
        self._request = request
        self._reply = reply
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answering = self._send_stream if self._stream else self._send_body
        await _watched(answering(scope, receive, send), receive)

    async def _send_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def keep(event: TextEvent) -> None:
            self._reply.add(event)

        response: Response
        try:
            await self._handler.answer(self._request, keep)
            response = await self._whole()
        except ServeError as error:
            response = error_response(error)
        await response(scope, receive, send)

    async def _whole(self) -> Response:
        """Makes long bodies on a thread, one at a time, so that they take turns with the loop."""
        if not self._reply.is_long:
            return JSONResponse(self._reply.body())
        async with self._handler.share.whole_bodies:
            body = await asyncio.to_thread(self._encoded)
        return Response(body, media_type="application/json")

    def _encoded(self) -> bytes:
        """Encodes in small pieces: Python's lock is not given up within one call of json's C code."""
        encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return "".join(encoder.iterencode(self._reply.body())).encode()

    async def _send_stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = _EventStream(send, scope.get("extensions", {}).get(WRITE_PART))

        async def beat() -> None:
            has_begun = events.is_started or self._request.point.resumptions > 0
            if has_begun and self._handler.dispatcher.hears_workers:
                await events.send_comment()

        pulse = Pulse(beat)

        async def forward(event: TextEvent) -> None:
            async with pulse.turns:  # several prompts are answered at once: what a token says was sent goes before it
                for token, chunk in self._reply.chunks(event):
                    await events.send(chunk, token)
                    pulse.sent()

        try:
            work = self._handler.answer(self._request, forward)
            await (pulse.during(work) if self._request.is_resumable else work)
            await events.send("[DONE]")
        except ServeError as error:
            if not events.is_started:
                await error_response(error)(scope, receive, send)
                return
            if isinstance(error, Draining) and self._request.is_resumable:
                return  # cut, not closed: a client that sees no end goes on at another router
            await events.send(encoded(error_body(error)))
        await events.close()


class _EventStream:
    def __init__(self, send: Send, write_part: Callable[[bytes], bool] | None) -> None:
        """`write_part`: how the server lets parts of a body be written at once, if it does."""
        self._send = send
        self._write_part = write_part
        self.is_started = False

    async def send(self, data: str, token: str = "") -> None:
        """Sends an event. `token` is what a client sends to resume after it.

        Only clients that ask for it get comments and lines other than data: stock clients take each line for a message,
        or drop messages with other lines.
        """
        await self._write(f"id: {token}\ndata: {data}\n\n" if token else f"data: {data}\n\n")

    async def send_comment(self) -> None:
        await self._write(": going on\n\n")

    async def _write(self, event: str) -> None:
        if not self.is_started:
            self.is_started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": list(_SSE_HEADERS)})
        data = event.encode()
        if self._write_part is None or not self._write_part(data):
            await self._send(_body(data, more=True))

    async def close(self) -> None:
        await self._send(_body(b"", more=False))


def _body(data: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def _watched(work: Coroutine[Any, Any, Value], receive: Receive) -> asyncio.Task[Value]:
    """Returns once `work` is done, or cancelled because the client went away."""

    async def cancel_on_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        worker.cancel()

    async with asyncio.TaskGroup() as group:
        worker = group.create_task(work)
        watcher = group.create_task(cancel_on_disconnect())
        worker.add_done_callback(lambda _: watcher.cancel())
    return worker
