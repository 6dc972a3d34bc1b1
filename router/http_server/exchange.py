"""One HTTP request and its response, as the ASGI application reads and writes them, and responses to invalid ones."""

from __future__ import annotations

import asyncio
import http
import logging
import re
import urllib.parse
from dataclasses import dataclass
from typing import Any, Protocol

import httptools
from starlette.types import ASGIApp, Message, Scope
from uvicorn.server import ServerState

from twostroke.observability.bug_log import log_bug

log = logging.getLogger(__name__)

MOST_BODY_BYTES = 64 << 10
"""Parsed bytes of a body that may wait for the application. Parsing stops until it has taken them."""

MOST_HEADER_BYTES = 64 << 10
"""Bytes of the head of one request. The `Last-Event-ID` of a client that resumes a stream may have 16 KiB."""
MOST_HEADERS = 256
"""Header lines of one request."""

_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode("ascii") for status in http.HTTPStatus
}
_BAD_NAME = re.compile(rb'[\x00-\x1f\x7f()<>@,;:\[\]={} \t\\"]')
_BAD_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_NO_BODY = (204, 304)

EXCHANGE = "twostroke.exchange"
"""Name of the ASGI extension through which the application gets its `Exchange`. With it, the application writes chunks
of a streamed body past the middleware, and has its task cancelled when the client disconnects."""

Headers = list[tuple[bytes, bytes]]


class ExchangeConnection(Protocol):
    """What an exchange needs from its connection."""

    def write(self, data: bytes) -> None: ...

    is_writable: bool
    """Whether the client has read enough of the response for more to be written."""

    async def writable(self) -> None:
        """Returns once `is_writable`."""

    def body_wanted(self) -> None:
        """Called when the application waits for more of the request's body."""

    def response_ended(self, exchange: Exchange) -> None: ...

    def abort(self) -> None: ...


@dataclass(frozen=True, slots=True)
class HttpRefusal:
    """The response to bytes that are not a valid request."""

    status: int
    message: str

    @property
    def rest(self) -> bytes:
        """All of the response but its status line."""
        body = (
            b'{"error":{"message":"%s","type":"invalid_request_error","param":null,"code":null}}'
            % self.message.encode()
        )
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        return head + body


NOT_HTTP = HttpRefusal(400, "this is not a valid HTTP request")
TOO_MUCH_FRAMING = HttpRefusal(400, "the chunks of the body are too small, or have too much beside their content")
TOO_MANY_HEADERS = HttpRefusal(431, f"the headers are more than {MOST_HEADERS} lines or {MOST_HEADER_BYTES} bytes")
OTHER_VERSION = HttpRefusal(505, "only HTTP/1.0 and HTTP/1.1 are spoken here")


class HttpRefused(Exception):
    def __init__(self, refusal: HttpRefusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def refusal_of(error: httptools.HttpParserError) -> HttpRefusal:
    return error.__context__.refusal if isinstance(error.__context__, HttpRefused) else NOT_HTTP


def status_line(status: int) -> bytes:
    return _STATUS_LINES.get(status) or f"HTTP/1.1 {status} \r\n".encode("ascii")


class Exchange:
    def __init__(self, wire: ExchangeConnection, scope: Scope, state: ServerState, *, keep_alive: bool) -> None:
        self.scope = scope
        self.keep_alive = keep_alive
        """The connection stays open after the response."""
        self.is_read = False
        """The whole request has been parsed."""
        self.is_complete = False
        """The whole response has been written."""
        self.is_gone = False
        """The client has left, or was cut off."""
        self.is_awaited = False
        """The application waits for a part of the request's body."""
        self.expects_continue = False
        """The client sends its body only after `100 Continue`."""
        self.framing = b""
        """Header line that frames the request's body: content-length or transfer-encoding. Empty: no body."""
        self.is_started = False
        self._wire = wire
        self._state = state
        self._body = bytearray()
        self._changed = asyncio.Event()
        self._ends_with_client: asyncio.Task[Any] | None = None
        """The application's task, if it is to be cancelled when the client leaves."""
        self._head = b""
        """Status line and headers, which leave together with the first part of the body."""
        self._is_chunked = False
        self._bytes_left: int | None = None
        """Bytes of the response's body that are still to be written. None: it has no content-length."""

    @property
    def wants_body(self) -> bool:
        return self.is_awaited and len(self._body) < MOST_BODY_BYTES

    def add_body(self, data: bytes) -> None:
        if not self.is_complete:
            self._body += data
            self._changed.set()

    def end_body(self) -> None:
        self.is_read = True
        self._changed.set()

    def leave(self) -> None:
        """Called when the client is gone."""
        self.is_gone = True
        self._changed.set()
        if self._ends_with_client is not None:
            self._ends_with_client.cancel()

    def end_with_client(self) -> None:
        """Has the calling task cancelled when the client leaves, or at once if it has left."""
        self._ends_with_client = asyncio.current_task()
        if self.is_gone and self._ends_with_client is not None:
            self._ends_with_client.cancel()

    async def run(self, app: ASGIApp) -> None:
        try:
            await app({**self.scope, "extensions": {EXCHANGE: self}}, self.receive, self.send)
        except asyncio.CancelledError:
            self._abort_unless_complete()
            raise
        except Exception as error:
            log_bug(log, "internal error over HTTP", error=error)
        if not self.is_started and not self.is_gone:
            await self._send_500()
        self._abort_unless_complete()

    async def receive(self) -> Message:
        if self.expects_continue and not self.is_started and not self.is_gone:
            self.expects_continue = False
            self._wire.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not self.is_gone and not self.is_complete and not self._changed.is_set():
            self.is_awaited = True
            try:
                self._wire.body_wanted()
                await self._changed.wait()
            finally:
                self.is_awaited = False
        self._changed.clear()
        if self.is_gone or self.is_complete:
            return {"type": "http.disconnect"}
        body, self._body = bytes(self._body), bytearray()
        return {"type": "http.request", "body": body, "more_body": not self.is_read}

    async def send(self, message: Message) -> None:
        await self._wire.writable()
        if self.is_gone:
            await asyncio.sleep(0)  # else a task that sends without a pause would starve the one that receives
            return
        if message["type"] == "http.response.start" and not self.is_started:
            self._start(message["status"], [*self._state.default_headers, *message.get("headers", [])])
        elif message["type"] == "http.response.body" and self.is_started and not self.is_complete:
            self._write_body(message.get("body", b""), is_last=not message.get("more_body", False))
        else:
            raise RuntimeError(f"unexpected ASGI message {message['type']!r}")

    @property
    def takes_parts(self) -> bool:
        """Whether `write_part` may be called now. If not, use `send`, which waits for the client."""
        return self._is_chunked and self._wire.is_writable and not (self._head or self.is_gone or self.is_complete)

    def write_part(self, data: bytes) -> None:
        self._wire.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _abort_unless_complete(self) -> None:
        if not self.is_complete and not self.is_gone:
            self._wire.abort()

    def _start(self, status: int, headers: Headers) -> None:
        self.is_started = True
        lines = [status_line(status)]
        # If the response starts before the request ends, the rest of its body is not parsed: no request can follow it.
        says_close = not (self.keep_alive and self.is_read)
        has_body = self.scope["method"] != "HEAD" and status not in _NO_BODY
        for name, value in headers:
            if _BAD_NAME.search(name) or _BAD_VALUE.search(value):
                raise RuntimeError(f"invalid response header {name!r}")
            if name == b"connection":
                says_close = says_close or b"close" in value.lower()
                continue
            if name == b"content-length" and has_body:
                self._bytes_left = int(value)
            lines.append(b"%s: %s\r\n" % (name, value))
        if has_body and self._bytes_left is None:
            if self.scope["http_version"] == "1.0":
                says_close = True  # the end of the connection is the end of the body
            else:
                self._is_chunked = True
                lines.append(b"transfer-encoding: chunked\r\n")
        if not has_body:
            self._bytes_left = 0
        self.keep_alive = not says_close
        if says_close:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        self._head = b"".join(lines)

    def _write_body(self, body: bytes, *, is_last: bool) -> None:
        if self.scope["method"] == "HEAD":
            body = b""
        if self._bytes_left is not None:
            self._bytes_left -= len(body)
            if self._bytes_left < 0 or (is_last and self._bytes_left):
                raise RuntimeError("the response's body is not as long as its content-length says")
        elif self._is_chunked:
            body = (b"%x\r\n%s\r\n" % (len(body), body) if body else b"") + (b"0\r\n\r\n" if is_last else b"")
        if self._head or body:
            self._wire.write(self._head + body)
            self._head = b""
        if is_last:
            self.is_complete = True
            self._changed.set()
            self._wire.response_ended(self)

    async def _send_500(self) -> None:
        self.keep_alive = False
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"21")]
        await self.send({"type": "http.response.start", "status": 500, "headers": headers})
        await self.send({"type": "http.response.body", "body": b"Internal Server Error"})


def exchange_of(
    wire: ExchangeConnection,
    peers: Scope,
    parser: httptools.HttpRequestParser,
    url: bytes,
    headers: Headers,
    state: ServerState,
) -> Exchange:
    """Returns the exchange of a request whose head `parser` has read. Raises HttpRefused.

    `peers` holds the scope entries of the connection: scheme, server and client.
    """
    version = parser.get_http_version()
    named = dict(headers)
    hosts = sum(name == b"host" for name, _ in headers)
    if hosts > 1 or (hosts == 0 and version == "1.1"):
        raise HttpRefused(NOT_HTTP)
    if version not in ("1.0", "1.1"):
        raise HttpRefused(OTHER_VERSION)
    coding, length = named.get(b"transfer-encoding"), named.get(b"content-length", b"0")
    if coding is not None and (version == "1.0" or coding.lower() != b"chunked"):
        raise HttpRefused(NOT_HTTP)
    method = parser.get_method().decode("ascii")
    parsed = httptools.parse_url(url)
    path = (parsed.path or b"/").decode("ascii")
    scope: Scope = {
        **peers,
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": version,
        "method": method,
        "root_path": "",
        "path": urllib.parse.unquote(path) if "%" in path else path,
        "raw_path": path.encode("ascii"),
        "query_string": parsed.query or b"",
        "headers": headers,
        "state": {},
    }
    keep_alive = version == "1.1" and parser.should_keep_alive() and not parser.should_upgrade()
    exchange = Exchange(wire, scope, state, keep_alive=keep_alive)
    if coding is not None or length.strip(b"0"):
        exchange.framing = b"content-length: " + length if coding is None else b"transfer-encoding: chunked"
    exchange.expects_continue = version == "1.1" and named.get(b"expect", b"").lower() == b"100-continue"
    return exchange
