"""Calls of gRPC by hand, of which a server gets the headers and the beginning of a message."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping


def http2(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


async def half_a_call(
    address: str, method: str, metadata: Mapping[bytes, bytes] | None = None
) -> tuple[bytes, asyncio.StreamWriter]:
    """What the server says, until the end of a call of which it gets the beginning of a message and no more."""
    fields = {b":method": b"POST", b":scheme": b"http", b":path": method.encode(), b":authority": b"x"}
    fields |= {b"te": b"trailers", b"content-type": b"application/grpc", **(metadata or {})}
    headers = b"".join(
        b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in fields.items()
    )
    reader, writer = await asyncio.open_connection(*address.split(":"))
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + http2(4, 0, 0, b"")
    begun = http2(1, 4, 1, headers) + http2(0, 0, 1, b"\0" + (60_000).to_bytes(4, "big") + bytes(1000))
    writer.write(preface + begun)
    said = b""
    try:
        async with asyncio.timeout(20):
            while True:
                length, kind, flags = int.from_bytes(await reader.readexactly(3), "big"), *await reader.readexactly(2)
                await reader.readexactly(4)
                said += await reader.readexactly(length)
                if kind == 1 and flags & 1:  # the trailers end the stream
                    return said, writer
    except BaseException:
        writer.close()
        raise
