"""How faults are armed in a process that runs: one line of JSON over loopback, answered by another.

The process listens on a port of its own choice and writes it into a file beside the journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socketserver
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from tests.trials.chaos.injection.plan import Fault, Guard
from twostroke.base.errors import DeadlineExceeded, InvalidRequest, PeerLost, ServeError

log = logging.getLogger(__name__)

ANSWER_S = 10.0
"""A process that is not broken answers within it, on a busy machine."""
POLL_S = 0.05


class Armable(Protocol):
    """The part of an injector that answers calls."""

    process: str
    off: Guard | None

    @property
    def reached(self) -> Mapping[str, int]: ...

    def arm(self, fault: Fault) -> None: ...

    def heal(self) -> None: ...


def port_file(journal: str | Path, process: str) -> Path:
    return Path(f"{journal}.{process}.port")


def serve(armable: Armable, file: Path) -> None:
    """Answers on a thread for as long as the process is alive; `file` says where, once it is written."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            try:
                said = _answer(armable, json.loads(self.rfile.readline()))
            except ServeError as error:
                said = {"error": error.message}
            self.wfile.write(json.dumps(said).encode() + b"\n")

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="fault-control", daemon=True).start()
    new = file.with_name(f"{file.name}.{os.getpid()}")
    new.write_text(str(server.server_address[1]))
    new.replace(file)
    log.warning("THIS PROCESS CAN BE BROKEN ON PURPOSE process=%s", armable.process)


def _answer(armable: Armable, asked: Mapping[str, Any]) -> dict[str, Any]:
    if asked["process"] != armable.process:
        raise InvalidRequest(f"this process is {armable.process}")  # the port was another one's, which is dead
    match asked["do"]:
        case "arm":
            fault = Fault.parse(asked["what"])
            armable.arm(fault)
            log.warning("fault armed fault=%s", fault)
        case "switch off":
            armable.off = Guard(asked["what"]) if asked["what"] else None
        case "heal":
            armable.heal()
    return {"reached": dict(armable.reached)}


async def arm(journal: Path, process: str, fault: Fault | str) -> None:
    """The fault happens when its point is reached for the count-th time from now on. It replaces one armed before."""
    await _ask(journal, process, "arm", str(fault))


async def switch_off(journal: Path, process: str, guard: Guard | None) -> None:
    """One guard is off from now on, and every other one on."""
    await _ask(journal, process, "switch off", guard or "")


async def heal(journal: Path, process: str) -> dict[str, int]:
    """Nothing is armed any more, and links are as they were. Returns how often each point has been reached."""
    return dict((await _ask(journal, process, "heal"))["reached"])


async def _ask(journal: Path, process: str, do: str, what: str = "") -> dict[str, Any]:
    """Raises PeerLost where nobody answers, DeadlineExceeded where it takes too long."""
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await _connected(port_file(journal, process), process)
            with contextlib.closing(writer):
                writer.write(json.dumps({"process": process, "do": do, "what": what}).encode() + b"\n")
                line = await reader.readline()
    except TimeoutError as error:
        raise DeadlineExceeded(f"{process} does not answer") from error
    except OSError as error:
        raise PeerLost(f"{process}: {error}") from error
    said: dict[str, Any] = json.loads(line) if line else {"error": "it ended"}
    if "error" in said:
        raise PeerLost(f"{process}: {said['error']}")
    return said


async def _connected(file: Path, process: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A process that has just begun may not have written its port yet."""
    give_up_s = time.monotonic() + ANSWER_S
    while True:
        try:
            return await asyncio.open_connection("127.0.0.1", int(file.read_text()))  # noqa: ASYNC240  # a few bytes
        except OSError as error:
            if time.monotonic() > give_up_s:
                raise PeerLost(f"{process}: {error}") from error
        await asyncio.sleep(POLL_S)
