"""A worker process that owns pages: opens transports, prints their endpoints, then obeys one-line commands."""

from __future__ import annotations

import asyncio
import json
import sys
import threading

import numpy as np

from twostroke.ids import Epoch, PageId
from twostroke.kv_cache.memory import PageMemory
from twostroke.transfer.base import Identity
from twostroke.transfer.registry import open_transports


def fill(memory: PageMemory, seed: int) -> None:
    """Page p's byte i is a function of (seed, p, i): `conftest.content` says the same."""
    column = np.arange(memory.page_bytes, dtype=np.uint32)
    for page in range(memory.pages):
        memory.data[page] = ((column * 31 + (column >> 8) + page * 7 + seed) & 0xFF).astype(np.uint8)


def obey(memory: PageMemory) -> None:
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "reuse":
            page = PageId(int(arguments[0]))
            memory.begin_new_generation(page)
            memory.page(page)[:] = 0xEE
        print("done", flush=True)


async def main() -> None:
    options = json.loads(sys.argv[1])
    memory = PageMemory(options["pages"], options["page_bytes"])
    fill(memory, options["seed"])
    epoch = Epoch.begin(options["incarnation"])
    identity = Identity(options["worker_id"], epoch, options["fingerprint"], options["token"])
    for transport in open_transports(options["transports"], "127.0.0.1"):
        endpoint = await transport.open(memory, identity)
        print(endpoint.pack().hex(), flush=True)
    threading.Thread(target=obey, args=(memory,), daemon=True).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
