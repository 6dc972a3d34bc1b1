"""Bytes on sockets: HTTP/1.1 requests, HTTP/2 frames, gRPC channels, with TLS where the server has it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from tests.trials.chaos.neighbours.target import Play, Target

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST, SETTINGS, PING, GOAWAY, WINDOW, CONTINUATION = 0, 1, 2, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4
UNLIMITED = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


def endpoint(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def tls(target: Target, *protocols: str) -> ssl.SSLContext | None:
    """None: the clients' ports are plain."""
    if not target.ca:
        return None
    context = ssl.create_default_context(cafile=target.ca)
    context.set_alpn_protocols(list(protocols or ("http/1.1",)))
    return context


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def dialled(
    address: str, context: ssl.SSLContext | None = None, receive_bytes: int = 0
) -> AsyncIterator[Connection]:
    """`receive_bytes`: a small buffer for what comes in, so that it is soon full. Closed with a reset."""
    plain = socket.socket()
    plain.setblocking(False)
    writer = None
    try:
        if receive_bytes:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await asyncio.get_running_loop().sock_connect(plain, endpoint(address))
        name = "127.0.0.1" if context is not None else None
        reader, writer = await asyncio.open_connection(sock=plain, ssl=context, server_hostname=name)
        yield reader, writer
    finally:
        if writer is not None:
            writer.transport.abort()
        else:
            plain.close()


def http_client(play: Play, receive_bytes: int = 0) -> contextlib.AbstractAsyncContextManager[Connection]:
    return dialled(play.target.http, tls(play.target), receive_bytes)


def head(
    play: Play, method: str, path: str, headers: Mapping[str, str] | None = None, *, key: str | None = None
) -> bytes:
    """The head of a request, without the empty line. `key`: instead of the client's own; empty: none."""
    shown = play.target.key if key is None else key
    said = {"Host": play.target.http} | ({"Authorization": f"Bearer {shown}"} if shown else {}) | dict(headers or {})
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in said.items())]
    return ("\r\n".join(lines) + "\r\n").encode("utf-8", "surrogateescape")


def post(
    play: Play, path: str, body: bytes, headers: Mapping[str, str] | None = None, *, key: str | None = None
) -> bytes:
    said = {"Content-Type": "application/json", "Content-Length": str(len(body))} | dict(headers or {})
    return head(play, "POST", path, said, key=key) + b"\r\n" + body


def chat(play: Play, text: str = "Good morning", **fields: Any) -> bytes:
    return json.dumps(
        {"model": play.target.model, "messages": [{"role": "user", "content": text}], "max_tokens": 8} | fields
    ).encode()


def completion(play: Play, prompt: Any = "Good morning", **fields: Any) -> bytes:
    return json.dumps({"model": play.target.model, "prompt": prompt, "max_tokens": 8} | fields).encode()


async def exchange(play: Play, request: bytes, most_bytes: int = 1 << 30) -> bytes:
    """Sends a whole request on a connection of its own and reads the answer, or its first `most_bytes`; its
    beginning."""
    async with http_client(play) as (reader, writer):
        writer.write(request)
        await writer.drain()
        begin = await reader.read(1 << 16)
        length, _, rest = _length_of(begin)
        got = len(rest)
        while got < min(length, most_bytes):
            part = await reader.read(1 << 16)
            if not part or (length == _UNKNOWN and part.endswith(b"0\r\n\r\n")):
                break
            got += len(part)
        return begin


_UNKNOWN = 1 << 40


def _length_of(begin: bytes) -> tuple[int, bytes, bytes]:
    header, separator, rest = begin.partition(b"\r\n\r\n")
    for line in header.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2]), separator, rest
    return (0 if rest.endswith(b"0\r\n\r\n") else _UNKNOWN), separator, rest


# HTTP/2


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def field(name: str, value: str) -> bytes:
    """A header as HPACK writes it in full: nothing indexed, nothing compressed."""
    return b"\0" + _string(name.encode()) + _string(value.encode())


def _string(text: bytes) -> bytes:
    if len(text) < 127:
        return bytes((len(text),)) + text
    rest, out = len(text) - 127, bytearray((127,))
    while rest >= 128:
        out.append(rest % 128 | 128)
        rest //= 128
    return bytes(out) + bytes((rest,)) + text


def call_headers(play: Play, path: str, extra: Iterable[tuple[str, str]] = ()) -> bytes:
    scheme = "https" if play.target.ca else "http"
    fields = [(":method", "POST"), (":scheme", scheme), (":path", path), (":authority", play.target.grpc)]
    fields += [("content-type", "application/grpc"), ("te", "trailers")]
    fields += [("authorization", f"Bearer {play.target.key}")] if play.target.key else []
    return b"".join(field(name, value) for name, value in [*fields, *extra])


def message(body: bytes, compressed: int = 0) -> bytes:
    """A gRPC message, as DATA frames carry it."""
    return struct.pack(">BI", compressed, len(body)) + body


@contextlib.asynccontextmanager
async def http2(play: Play, settings: bytes = b"", receive_bytes: int = 0) -> AsyncIterator[Connection]:
    """A connection to the gRPC port, past the preface. What comes in is read and forgotten."""
    async with dialled(play.target.grpc, tls(play.target, "h2"), receive_bytes) as (reader, writer):
        writer.write(PREFACE + frame(SETTINGS, payload=settings))
        await writer.drain()
        if receive_bytes:
            yield reader, writer
            return
        reading = asyncio.ensure_future(_forget(reader))
        try:
            yield reader, writer
        finally:
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await reading


async def _forget(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        while await reader.read(1 << 16):
            pass


# gRPC


def channel(play: Play, options: Sequence[tuple[str, Any]] = ()) -> grpc.aio.Channel:
    """A connection of its own to the clients' gRPC port."""
    alone = (("grpc.use_local_subchannel_pool", 1), *UNLIMITED, *options)
    if not play.target.ca:
        return grpc.aio.insecure_channel(play.target.grpc, options=alone)
    credentials = grpc.ssl_channel_credentials(Path(play.target.ca).read_bytes())
    return grpc.aio.secure_channel(play.target.grpc, credentials, options=alone)


def shown(play: Play) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {play.target.key}"),) if play.target.key else ()
