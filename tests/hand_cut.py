"""Reads event streams as clients do that were written by hand: cut at blank lines, `data: ` off, JSON, until [DONE].

vLLM's and SGLang's benchmark clients, guidellm and countless scripts do this and no more: a line of any other kind, an
event with two lines or a comment makes them fail, or count what is not a token."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

Json = dict[str, Any]
RESUMING_HEADERS = ("x-resumable-stream", "last-event-id")
"""The headers with which a client asks for more than hand-cut ones read."""
NAMED_PATHS = ("/v1/responses", "/v1/messages")
"""Paths whose streams name the type of every event in a line of its own. No client cuts them by hand."""


class HandCut:
    """The reader of one stream: bytes in, messages out. Raises AssertionError for whatever such a client would stumble
    over."""

    def __init__(self) -> None:
        self._rest = ""
        self.is_done = False

    def feed(self, data: bytes) -> list[Json]:
        *events, self._rest = (self._rest + data.decode()).split("\n\n")
        return [message for event in events for message in self._read(event)]

    def _read(self, event: str) -> list[Json]:
        assert not self.is_done, f"{event!r} follows [DONE]"
        assert event.startswith("data: "), f"not a data line: {event!r}"
        said = event.removeprefix("data: ")
        if said == "[DONE]":
            self.is_done = True
            return []
        message: Json = json.loads(said)
        return [message]

    def end(self) -> None:
        assert not self._rest, f"the stream ends in the middle of {self._rest!r}"


def messages_of(body: bytes) -> list[Json]:
    """Returns the messages of a whole stream, errors included."""
    reader = HandCut()
    messages = reader.feed(body)
    reader.end()
    return messages


class HandCutTransport(httpx.AsyncBaseTransport):
    """Below any client made with httpx, openai's for one: reads along, and fails where a client cut by hand would."""

    def __init__(self) -> None:
        self._inner = httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await self._inner.handle_async_request(request)
        is_plain = not any(header in request.headers for header in RESUMING_HEADERS)
        is_plain = is_plain and not request.url.path.startswith(NAMED_PATHS)
        if is_plain and response.headers.get("content-type", "").startswith("text/event-stream"):
            assert isinstance(response.stream, httpx.AsyncByteStream)
            response.stream = _ReadAlong(response.stream)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


class _ReadAlong(httpx.AsyncByteStream):
    def __init__(self, stream: httpx.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        reader = HandCut()
        async for data in self._stream:
            reader.feed(data)
            yield data
        reader.end()

    async def aclose(self) -> None:
        await self._stream.aclose()
