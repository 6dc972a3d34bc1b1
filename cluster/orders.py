"""What a running `twostroke serve` is told to do: a line of JSON over a Unix socket in its folder, and one back.

Whoever reaches the socket is the launcher's own user: the folder is closed to everybody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from twostroke import errors
from twostroke.errors import InternalError, InvalidRequest, PeerLost, ServeError

log = logging.getLogger(__name__)

SOCKET = "orders"
"""In the launcher's folder."""

Order = Callable[..., Awaitable[Any]]
"""Gets the fields of the message as arguments; what it returns goes back."""


@contextlib.asynccontextmanager
async def taking(folder: Path, orders: Mapping[str, Order]) -> AsyncIterator[None]:
    """Inside, orders are carried out; one that has begun goes on when the one who gave it goes away."""
    begun: set[asyncio.Task[str]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            task = asyncio.create_task(_carried_out(orders, await reader.readline()))
            begun.add(task)
            task.add_done_callback(begun.discard)
            writer.write((await asyncio.shield(task)).encode() + b"\n")
            await writer.drain()
        except ConnectionError:
            pass  # nobody wants to know any more
        finally:
            writer.close()

    server = await asyncio.start_unix_server(serve, folder / SOCKET)
    try:
        yield
    finally:
        server.close()
        for task in begun:
            task.cancel()
        await asyncio.gather(*begun, return_exceptions=True)


async def _carried_out(orders: Mapping[str, Order], line: bytes) -> str:
    try:
        fields = json.loads(line)
        name = fields.pop("order")
        if name not in orders:
            raise InvalidRequest(f"there is no order {name!r}")
        return json.dumps({"result": await orders[name](**fields)})
    except ServeError as error:
        return json.dumps({"error": type(error).__name__, "message": error.message})
    except Exception as error:
        log.exception("order failed line=%r", line)
        return json.dumps({"error": "InternalError", "message": f"{type(error).__name__}: {error}"})


def give(folder: Path, order: str, **fields: object) -> Any:
    """What the launcher answers. Raises the ServeError that it met, PeerLost where it cannot be reached."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(folder / SOCKET))
            connection.sendall(json.dumps({"order": order, **fields}).encode() + b"\n")
            with connection.makefile("r") as lines:
                line = lines.readline()
    except OSError as error:
        raise PeerLost(f"the server does not take orders at {folder / SOCKET}: {error}") from error
    if not line:
        raise PeerLost("the server ended before it had answered")
    answer = json.loads(line)
    if "error" in answer:
        raise getattr(errors, answer["error"], InternalError)(answer["message"])
    return answer["result"]
