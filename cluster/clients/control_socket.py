"""Serves the Unix socket over which commands control a launcher: one line of JSON each way.

The socket is in the launcher's folder, which other users cannot read.
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

from twostroke.base.errors import InvalidRequest, PeerLost, ServeError
from twostroke.rpc.convert import rebuild_error

log = logging.getLogger(__name__)

SOCKET = "control"
"""Name of the socket in the launcher's folder."""

Handler = Callable[..., Awaitable[Any]]
"""Gets the fields of the message as arguments and returns the reply."""


@contextlib.asynccontextmanager
async def serving_socket(folder: Path, handlers: Mapping[str, Handler]) -> AsyncIterator[None]:
    """Serves the socket inside the block. A command that has begun finishes even if its caller disconnects."""
    running: set[asyncio.Task[str]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            task = asyncio.create_task(_handle(handlers, await reader.readline()))
            running.add(task)
            task.add_done_callback(running.discard)
            writer.write((await asyncio.shield(task)).encode() + b"\n")
            await writer.drain()
        except ConnectionError:
            pass  # the caller has gone away
        finally:
            writer.close()

    server = await asyncio.start_unix_server(serve, folder / SOCKET)
    try:
        yield
    finally:
        server.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _handle(handlers: Mapping[str, Handler], line: bytes) -> str:
    try:
        fields = json.loads(line)
        name = fields.pop("command")
        if name not in handlers:
            raise InvalidRequest(f"there is no command {name!r}")
        return json.dumps({"result": await handlers[name](**fields)})
    except ServeError as error:
        return json.dumps({"error": type(error).__name__, "message": error.message})
    except Exception as error:
        log.exception("command failed line=%r", line)
        return json.dumps({"error": "InternalError", "message": f"{type(error).__name__}: {error}"})


def send(folder: Path, command: str, **fields: object) -> Any:
    """Returns the launcher's reply. Raises the command's ServeError, or PeerLost if the launcher is out of reach."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(folder / SOCKET))
            connection.sendall(json.dumps({"command": command, **fields}).encode() + b"\n")
            with connection.makefile("r") as lines:
                line = lines.readline()
    except OSError as error:
        raise PeerLost(f"the launcher does not answer at {folder / SOCKET}: {error}") from error
    if not line:
        raise PeerLost("the server ended before it had answered")
    reply = json.loads(line)
    if "error" in reply:
        raise rebuild_error(reply["error"], reply["message"], None)
    return reply["result"]
