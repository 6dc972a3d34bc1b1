"""A worker process that owns pages: opens transports, tells their endpoints, then obeys one-line commands."""

from __future__ import annotations

import asyncio
import threading
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from tests.unit.transfer.makers import bytes_of, make_memory, make_transport
from twostroke.ids import Epoch, PageId
from twostroke.kv_cache.memory import Pages
from twostroke.transfer.base import Identity


def content(page: int, page_bytes: int, seed: int) -> np.ndarray:
    """Page p's byte i is a function of (seed, p, i)."""
    column = np.arange(page_bytes, dtype=np.uint32)
    return ((column * 31 + (column >> 8) + page * 7 + seed) & 0xFF).astype(np.uint8)


def obey(memory: Pages, commands: Connection) -> None:
    while True:
        command, *arguments = commands.recv().split()
        if command == "reuse":
            page = PageId(int(arguments[0]))
            memory.begin_new_generation(page)
            bytes_of(memory)[page] = 0xEE
        commands.send("done")


async def serve(commands: Connection, options: dict[str, Any]) -> None:
    memory = make_memory(options["group"], options["pages"], options["page_bytes"])
    for page in range(memory.pages):
        bytes_of(memory)[page] = content(page, memory.page_bytes, options["seed"])
    epoch = Epoch.begin(options["incarnation"])
    identity = Identity(options["worker_id"], epoch, options["fingerprint"], options["token"])
    transports = [make_transport(kind) for kind in options["kinds"]]
    commands.send([(await transport.open(memory, identity)).pack() for transport in transports])
    threading.Thread(target=obey, args=(memory, commands), daemon=True).start()
    await asyncio.Event().wait()


def run(commands: Connection, options: dict[str, Any]) -> None:
    asyncio.run(serve(commands, options))
