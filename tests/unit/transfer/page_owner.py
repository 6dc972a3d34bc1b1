"""Worker processes: an owner opens transports, tells their endpoints, then obeys; a reader pulls without end."""

from __future__ import annotations

import asyncio
import functools
import threading
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from tests.unit.transfer.makers import fill, group_of, make_memory, make_transport
from twostroke.base.ids import Epoch, PageId
from twostroke.kv_cache.layout import PageRegion
from twostroke.kv_cache.memory import Pages
from twostroke.transfer.base import Identity, PageCopy, PageEndpoint


def content(page: int, page_bytes: int, seed: int) -> np.ndarray:
    """Page p's byte i is a function of (seed, p, i)."""
    return column(page_bytes) + np.uint8((page * 7 + seed) & 0xFF)


@functools.cache
def column(page_bytes: int) -> np.ndarray:
    """Returns what the bytes of all pages of one size differ in by their places."""
    at = np.arange(page_bytes, dtype=np.uint32)
    return ((at * 31 + (at >> 8)) & 0xFF).astype(np.uint8)


def obey(memory: Pages, commands: Connection) -> None:
    while True:
        command, *arguments = commands.recv().split()
        if command == "reuse":
            page = PageId(int(arguments[0]))
            memory.begin_new_generation(page)
            fill(memory, [page], lambda _: np.full(memory.page_bytes, 0xEE, np.uint8))
        commands.send("done")


async def serve(commands: Connection, options: dict[str, Any]) -> None:
    further = [PageRegion(*region) for region in options["further"]]
    memory = make_memory(options["group"], options["pages"], options["page_bytes"], *further)
    size = memory.layout.page_bytes_of
    fill(memory, range(memory.pages), lambda page: content(page, size(page), options["seed"]))
    epoch = Epoch.begin(options["incarnation"])
    identity = Identity(options["worker_id"], epoch, options["fingerprint"], options["token"])
    transports = [make_transport(kind) for kind in options["kinds"]]
    commands.send([(await transport.open(memory, identity)).pack() for transport in transports])
    threading.Thread(target=obey, args=(memory, commands), daemon=True).start()
    await asyncio.Event().wait()


def run(commands: Connection, options: dict[str, Any]) -> None:
    asyncio.run(serve(commands, options))


async def read_forever(commands: Connection, kind: str, packed: bytes, deadline_s: float) -> None:
    endpoint = PageEndpoint.unpack(packed)
    memory = make_memory(group_of(kind), endpoint.layout.pages, endpoint.layout.regions[0].page_bytes)
    transport = make_transport(kind)
    await transport.open(memory, Identity("doomed", Epoch.begin(1), endpoint.fingerprint, "secret"))
    peer = await transport.connect(endpoint, 5.0)
    copies = [PageCopy(PageId(page), PageId(memory.pages - 1 - page), 0) for page in range(memory.pages)]
    commands.send("reading")
    while True:
        transfer = transport.pull(peer, copies, deadline_s)
        await transport.wait(transfer)
        await transport.fence(transfer)


def run_reader(commands: Connection, kind: str, packed: bytes, deadline_s: float) -> None:
    asyncio.run(read_forever(commands, kind, packed, deadline_s))
