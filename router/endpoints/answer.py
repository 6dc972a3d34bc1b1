"""One response over HTTP, which is a JSON body or server-sent events. It is cancelled when its client disconnects."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.dialects.reply import JSON_LENGTH_HEADER, ErrorForm, Json, JsonWithBytes, Reply
from router.endpoints.errors import error_response
from router.http_server.exchange import EXCHANGE, Exchange
from router.requests.client_request import ClientRequest
from router.requests.request_handler import RequestHandler
from router.requests.resume import with_pulse
from router.text.output.events import TextEvent, WholeOutput
from twostroke.base.errors import Draining, ServeError

_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class AnswerResponse:
    """An ASGI application that runs one request and writes its answer.

    Status and headers wait for the first event, so that a request that fails before its first token gets the status of
    its failure.
    """

    def __init__(
        self,
        handler: RequestHandler,
        request: ClientRequest,
        reply: Callable[[], Reply],
        errors: ErrorForm,
        *,
        stream: bool,
    ) -> None:
        """`reply` makes a new reply each time. A whole answer may begin again, and then needs another one."""
        self._errors = errors
        self._handler = handler
        self._request = request
        self._new_reply = reply
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answering = self._send_stream if self._stream else self._send_body
        await answering(scope, receive, send)

    async def _send_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        response: Response
        try:
            body = await self._handler.answer_whole(self._request, lambda: WholeOutput(self._new_reply()))
            response = await self._whole(body.reply)
        except ServeError as error:
            response = error_response(error, self._errors, self._request.request_id)
        await response(scope, receive, send)

    async def _whole(self, reply: Reply) -> Response:
        """Returns a whole answer. Long bodies are made on a thread, one at a time, to keep the event loop running."""
        if not reply.is_long:
            return _response(reply.body(), _ENCODER.encode)
        async with self._handler.share.whole_bodies:
            return await asyncio.to_thread(lambda: _response(reply.body(), _encoded_in_pieces))

    async def _send_stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = self._new_reply()
        events = _EventStream(reply, send, scope.get("extensions", {}).get(EXCHANGE))
        try:
            work = self._handler.answer(self._request, events)
            if self._request.is_resumable:
                has_begun, dispatcher = self._request.point.resumptions > 0, self._handler.dispatcher
                work = with_pulse(
                    work, events, lambda: (has_begun or events.is_started) and dispatcher.knows_decode_worker
                )
            await work
            await events.end(reply.end())
        except ServeError as error:
            if not events.is_started:
                failed = error_response(error, self._errors, self._request.request_id)
                await failed(scope, receive, send)
                return
            if isinstance(error, Draining) and self._request.is_resumable:
                return  # without an end of the stream: such a client resumes at another router
            await events.end(reply.failure(error))


class _EventStream:
    """A stream of server-sent events. They are written directly while the connection takes them, else through ASGI."""

    def __init__(self, reply: Reply, send: Send, parts: Exchange | None) -> None:
        self._reply = reply
        self._send = send
        self._parts = parts
        self._unsent: list[str] = []
        """Messages that the connection has not taken yet."""
        self.is_started = False
        self.sent_s = time.monotonic()
        self.turn = asyncio.Lock()
        """Held while anything is sent through ASGI, to keep the order: a resume token counts all messages before it."""

    @property
    def is_ready(self) -> bool:
        return not self._unsent and self._parts is not None and self._parts.takes_parts

    def put(self, event: TextEvent) -> None:
        messages = self._reply.messages(event)
        if messages:  # an empty part would end the response's body
            self._unsent.append(messages)

    def flush(self) -> None:
        if self._parts is not None and self._unsent:
            self._parts.write_part("".join(self._unsent).encode())
            self._unsent.clear()
            self.sent_s = time.monotonic()

    async def drain(self) -> None:
        async with self.turn:
            await self._write(is_last=False)

    async def beat(self) -> None:
        self._unsent.append(self._reply.beat())
        await self._write(is_last=False)

    async def end(self, messages: str) -> None:
        self._unsent.append(messages)
        async with self.turn:
            await self._write(is_last=True)

    async def _write(self, *, is_last: bool) -> None:
        if not (self._unsent or is_last):
            return
        if not self.is_started:
            self.is_started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": list(_SSE_HEADERS)})
        count, data = len(self._unsent), "".join(self._unsent).encode()
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})
        del self._unsent[:count]
        self.sent_s = time.monotonic()


def _response(body: Json | JsonWithBytes, encode: Callable[[Json], str]) -> Response:
    if not isinstance(body, JsonWithBytes):
        return Response(encode(body).encode(), media_type="application/json")
    head = encode(body.json).encode()
    headers = {JSON_LENGTH_HEADER: str(len(head))}
    return Response(head + body.raw_bytes, media_type="application/octet-stream", headers=headers)


def _encoded_in_pieces(body: Json) -> str:
    """Encodes piece by piece, so that other threads run in between: json's C code holds the GIL during a call."""
    return "".join(_ENCODER.iterencode(body))
