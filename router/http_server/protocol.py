"""One HTTP connection, parsed in small pieces and within time limits: no client delays others or keeps them out.

A head is parsed as it comes. A body is parsed only while the application asks for it, in turns with other connections.
Once a request has its response, the rest of its body is discarded unparsed and its connection ends.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from typing import Any, ClassVar

import httptools
from starlette.types import ASGIApp, Scope
from uvicorn import Config
from uvicorn.protocols.utils import get_local_addr, get_remote_addr, is_ssl
from uvicorn.server import ServerState

from router.http_server.exchange import (
    MOST_HEADER_BYTES,
    MOST_HEADERS,
    TOO_MANY_HEADERS,
    TOO_MUCH_FRAMING,
    Exchange,
    Headers,
    HttpRefusal,
    HttpRefused,
    exchange_of,
    refusal_of,
    status_line,
)
from router.http_server.lingering import ConnectionTimer, Lingering
from router.http_server.loop_share import LoopShare
from router.http_server.reader_watch import ReaderWatch
from twostroke.security.connection_room import ConnectionRoom

HEADERS_S = 20.0
"""Seconds for the head of a request: after the start of the connection, later after the first byte of the head."""
STALL_S = 60.0
"""Seconds after which a client that reads nothing of its response counts as gone."""
SPARE_FRAMING_BYTES = 64 << 10
"""Bytes of chunk sizes, extensions and trailers that a body may have, besides one for `FRAMED_BYTES` of content."""
FRAMED_BYTES = 8
SLICE_BYTES = 4 << 10
"""Bytes that are parsed at once. As chunks of one byte, they cause 700 calls of `on_body`, half a millisecond."""
LEAST_BYTES_PER_S = 16 << 10
"""Bytes per second of a body below which its connection falls behind. Such connections end first to make room."""

_NOTHING = memoryview(b"")


class TimedProtocol(asyncio.Protocol):
    most_connections: ClassVar[int]
    share: ClassVar[LoopShare]
    arriving: ClassVar[weakref.WeakSet[TimedProtocol]]
    """Protocols before `connection_made`. The set is weak: asyncio may drop a connection without calling them."""
    lingering: ClassVar[dict[TimedProtocol, None]]
    """Connections whose clients have their answer, in the order in which they got it."""
    room: ClassVar[ConnectionRoom[tuple[float, float, TimedProtocol]]]
    """Connections with how far each was behind, and since when it waited then."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        if not config.loaded:
            config.load()
        self._app: ASGIApp = config.loaded_app
        self._keep_alive_s = config.timeout_keep_alive
        self._state = server_state
        self._connections: set[Any] = server_state.connections
        self._loop = _loop or asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        # Bytes after the last request are ignored. Without this option they would be errors of that request.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._transport: asyncio.Transport
        self._reader = ReaderWatch(self._loop)
        self._peers: Scope = {}
        """Scope entries that all requests of this connection have: scheme, server and client."""
        self.is_writable = True
        self._writable = asyncio.Event()
        self._writable.set()
        self._unparsed = _NOTHING
        self._is_parsing = False
        """`_parse_in_turn` is queued in the loop's share."""
        self._head_bytes = 0
        self._framing_bytes = 0
        """Bytes of the body being parsed that are neither content nor the framing that its content may have."""
        self._url = b""
        self._headers: Headers = []
        self._reading: Exchange | None = None
        """The request whose body is being parsed."""
        self._answering: Exchange | None = None
        self._pipelined: deque[Exchange] = deque()
        self._is_between_requests = False
        """Nothing has come since the last response."""
        self._is_last = False
        """No further request is taken."""
        self._lingers: Lingering | None = None
        self._body_bytes = 0
        self._timer = ConnectionTimer(self._loop)
        self._waits_since_s = 0.0
        self.arriving.add(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.arriving.discard(self)
        self._connections.add(self)
        self._transport = transport
        self._peers = {
            "scheme": "https" if is_ssl(transport) else "http",
            "server": get_local_addr(transport),
            "client": get_remote_addr(transport),
        }
        self._waits_since_s = self._loop.time()
        self._timer.restart(HEADERS_S, self.abort)
        if len(self._connections) > self.most_connections:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self.lingering.pop(self, None)
        self._timer.stop()
        self._reader.stop()
        self._unparsed = _NOTHING
        self._is_last = True
        self._writable.set()
        for exchange in (self._answering, *self._pipelined):
            if exchange is not None:
                exchange.leave()
        self._parser = None  # type: ignore[assignment]  # it refers to this object, which is a cycle

    def data_received(self, data: bytes) -> None:
        if self._lingers is not None:
            self._lingers.drop(len(data))
            return
        if self._is_between_requests:
            self._is_between_requests = False
            self._waits_since_s = self._loop.time()
            self._timer.restart(HEADERS_S, self.abort)
        self._unparsed = memoryview(bytes(self._unparsed) + data if self._unparsed else data)
        if not self._is_parsing and self._parse():
            self._is_parsing = True
            self.share.run(self._parse_in_turn)
        self._read_or_not()

    def pause_writing(self) -> None:
        self.is_writable = False
        self._writable.clear()
        self._reader.start(self._transport, STALL_S, self.abort)

    def resume_writing(self) -> None:
        self.is_writable = True
        self._writable.set()
        self._reader.stop()

    def shutdown(self) -> None:
        """Ends the connection, after the response that is on its way."""
        if self._answering is None:
            self._transport.close()
        else:
            self._answering.keep_alive = False

    @property
    def is_served(self) -> bool:
        """Whether a response is on its way, or the client has not taken all of the last one."""
        return self._answering is not None or self._transport.get_write_buffer_size() > 0

    # What an exchange needs from its connection.

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    async def writable(self) -> None:
        await self._writable.wait()

    def body_wanted(self) -> None:
        if self._unparsed and not self._is_parsing:
            self._is_parsing = True
            self.share.run(self._parse_in_turn)
        self._read_or_not()

    def response_ended(self, exchange: Exchange) -> None:
        self._state.total_requests += 1
        self._answering = None
        if self._transport.is_closing():
            return
        if not exchange.keep_alive:
            self._is_last = True
            if exchange.is_read and not self._unparsed:
                self._transport.close()
            else:
                self._linger()
            return
        if self._pipelined:
            self._answer(self._pipelined.popleft())
            return
        self._body_bytes = 0
        self._waits_since_s = self._loop.time()
        self._is_between_requests = self._head_bytes == 0 and not self._unparsed
        self._timer.restart(self._keep_alive_s if self._is_between_requests else HEADERS_S, self._transport.close)
        self.body_wanted()

    def abort(self) -> None:
        self._transport.abort()

    # Parsing. The parser calls the methods on_*.

    @property
    def _may_parse(self) -> bool:
        if self._is_last and self._reading is None:
            return False
        if self._reading is None:
            return self._answering is None  # else a next request waits until this one is answered
        return self._reading is self._answering and self._reading.wants_body

    def _parse_in_turn(self) -> bool:
        self._is_parsing = self._parse()
        self._read_or_not()
        return self._is_parsing

    def _parse(self) -> bool:
        """Parses one piece. Returns False where nothing is left that may be parsed now."""
        if not (self._unparsed and self._may_parse) or self._transport.is_closing():
            return False
        piece, self._unparsed = self._unparsed[:SLICE_BYTES], self._unparsed[SLICE_BYTES:]
        if self._reading is None:
            self._head_bytes += len(piece)
        else:
            self._framing_bytes += len(piece)
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserUpgrade as stopped:
            self._go_on_in_this_protocol(piece[stopped.args[0] :])
        except httptools.HttpParserError as error:
            self._refuse(refusal_of(error))
            return False
        if self._reading is None and self._answering is None and self._head_bytes > MOST_HEADER_BYTES:
            self._refuse(TOO_MANY_HEADERS)
        elif self._framing_bytes > SPARE_FRAMING_BYTES:
            self._refuse(TOO_MUCH_FRAMING)
        return bool(self._unparsed) and self._may_parse and self._lingers is None

    def _go_on_in_this_protocol(self, rest: memoryview) -> None:
        """Answers a request for an upgrade in HTTP/1.1, with a new parser for its body: the old one has stopped."""
        self._is_last = True
        if self._reading is None:
            return
        self._parser = httptools.HttpRequestParser(_BodyOnly(self))
        self._parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n\r\n" % self._reading.framing)
        self._unparsed = memoryview(bytes(rest) + bytes(self._unparsed))

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reading is not None or self._is_last:
            return  # trailers are ignored
        if len(self._headers) == MOST_HEADERS:
            raise HttpRefused(TOO_MANY_HEADERS)
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._is_last:
            return
        self._head_bytes = self._framing_bytes = self._body_bytes = 0
        exchange = exchange_of(self, self._peers, self._parser, self._url, self._headers, self._state)
        self._reading = exchange
        if not exchange.keep_alive:
            self._is_last = True
        if self._answering is None:
            self._answer(exchange)
        else:
            self._pipelined.append(exchange)

    def on_body(self, body: bytes) -> None:
        if self._reading is None:
            return
        self._body_bytes += len(body)
        self._framing_bytes = max(0, self._framing_bytes - len(body) - len(body) // FRAMED_BYTES)
        self._reading.add_body(body)

    def on_message_complete(self) -> None:
        if self._reading is None or (self._parser.should_upgrade() and self._reading.framing):
            return
        if not self._parser.should_keep_alive():
            self._is_last = True
            self._reading.keep_alive = False
        self._reading.end_body()
        self._reading = None

    def _answer(self, exchange: Exchange) -> None:
        self._answering = exchange
        self._timer.stop()
        self._waits_since_s = self._loop.time()
        task = self._loop.create_task(exchange.run(self._app))
        task.add_done_callback(self._state.tasks.discard)
        self._state.tasks.add(task)

    # Reading, and how it ends.

    def _read_or_not(self) -> None:
        """Pauses reading while received bytes cannot be parsed yet, so that the client keeps the others."""
        if self._unparsed or (self._reading is not None and not self._may_parse):
            self._transport.pause_reading()
        elif self._lingers is None:
            self._transport.resume_reading()

    def _refuse(self, refusal: HttpRefusal) -> None:
        """Answers bytes that are not a valid request. No further request is taken."""
        self._is_last = True
        self._unparsed = _NOTHING
        answering = self._answering
        if answering is not None and answering is not self._reading:
            answering.keep_alive = False  # what is wrong came after it
            return
        if answering is not None:
            answering.leave()
            if answering.is_started:
                self.abort()
                return
        self._answering = self._reading = None
        self._transport.write(status_line(refusal.status) + refusal.rest)
        self._linger()

    def _linger(self) -> None:
        """Reads on before it closes: unread bytes would reset the connection, and the client might miss its answer."""
        self.lingering[self] = None
        self._unparsed = _NOTHING
        self._waits_since_s = self._loop.time()
        self._lingers = Lingering(self._transport, self.share, self._timer)

    # Time, and room for others.

    def _behind_s(self, now_s: float) -> float:
        """Returns the seconds it has waited for its client, less those that the body so far may take."""
        return now_s - self._waits_since_s - self._body_bytes / LEAST_BYTES_PER_S

    @property
    def _is_protected(self) -> bool:
        """Whether the client waits for this router, and not the router for the client."""
        return self._answering is not None and self._answering.is_read

    def _make_room(self) -> None:
        """Ends the connection that is furthest behind, so that silent clients and slow bodies keep nobody out.

        Connections that linger go first, without a search: clients that are refused as fast as they connect make
        many of these.
        """
        if self.lingering:
            _end_to_make_room(next(iter(self.lingering)))
            return
        now_s = self._loop.time()

        def furthest_behind_first() -> list[tuple[float, float, TimedProtocol]]:
            waiting = [each for each in self._connections if isinstance(each, TimedProtocol) and not each._is_protected]
            behind = [(each._behind_s(now_s), each._waits_since_s, each) for each in waiting]
            return sorted(behind, key=lambda entry: entry[0], reverse=True)

        def is_still_behind(entry: tuple[float, float, TimedProtocol]) -> bool:
            behind_s, since_s, each = entry
            if each not in self._connections or each._is_protected or each._waits_since_s != since_s:
                return False
            return each._behind_s(now_s) >= behind_s

        going = self.room.next(len(self._connections), furthest_behind_first, is_still_behind, now_s)
        _end_to_make_room(self if going is None else going[-1])


def _end_to_make_room(connection: TimedProtocol) -> None:
    """Ends a connection. It counts no more at once: a newcomer that comes before it is lost ends another one."""
    connection._connections.discard(connection)
    connection.lingering.pop(connection, None)
    connection.abort()


class _BodyOnly:
    """Callbacks of a parser that reads a made-up head and then a body: the head calls nothing."""

    def __init__(self, connection: TimedProtocol) -> None:
        self.on_body = connection.on_body
        self.on_message_complete = connection.on_message_complete


def timed_protocol(most_connections: int) -> type[TimedProtocol]:
    facts = {
        "most_connections": most_connections,
        "arriving": weakref.WeakSet(),
        "lingering": {},
        "room": ConnectionRoom(),
        "share": LoopShare(),
    }
    return type("TimedProtocol", (TimedProtocol,), facts)
