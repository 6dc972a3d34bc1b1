"""Owners of pages in processes of their own, readers in this one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from twostroke.ids import Epoch, PageId
from twostroke.kv_cache.memory import PageMemory
from twostroke.transfer.base import Endpoint, Identity, PageCopy, PageTransport, Peer, TransferResult
from twostroke.transfer.fake import FakeTransport
from twostroke.transfer.shm import ShmTransport
from twostroke.transfer.tcp import TcpTransport

ROOT = Path(__file__).parents[3]
PAGES, PAGE_BYTES = 64, 5000
TRANSPORTS = ["shm", "tcp"]


class Owner:
    """A process that owns pages (page_owner.py)."""

    def __init__(self, **options: Any) -> None:
        self.options = {
            "transports": TRANSPORTS,
            "worker_id": "owner",
            "incarnation": 1,
            "fingerprint": "fingerprint-a",
            "token": "secret",
            "pages": PAGES,
            "page_bytes": PAGE_BYTES,
            "seed": 1,
        } | options
        command = [sys.executable, str(Path(__file__).with_name("page_owner.py")), json.dumps(self.options)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
        )
        endpoints = [Endpoint.unpack(bytes.fromhex(self._line())) for _ in self.options["transports"]]
        self.endpoints = {endpoint.transport: endpoint for endpoint in endpoints}

    def content(self, page: int) -> npt.NDArray[np.uint8]:
        column = np.arange(self.options["page_bytes"], dtype=np.uint32)
        return ((column * 31 + (column >> 8) + page * 7 + self.options["seed"]) & 0xFF).astype(np.uint8)

    def tell(self, command: str) -> None:
        """Returns once the owner has obeyed."""
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        assert self._line() == "done"

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        while self._state() != "T":
            time.sleep(0.001)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def _state(self) -> str:
        stat = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="ascii")
        return stat.rpartition(")")[2].split()[0]


class Reader:
    """A worker in this process that reads pages over one transport."""

    def __init__(self, transport: PageTransport, pages: int, page_bytes: int) -> None:
        self.transport = transport
        self.memory = PageMemory(pages, page_bytes)

    async def open(self, **changes: Any) -> Endpoint:
        facts: dict[str, Any] = {
            "worker_id": "reader",
            "epoch": Epoch.begin(1),
            "fingerprint": "fingerprint-a",
            "token": "secret",
        }
        return await self.transport.open(self.memory, Identity(**(facts | changes)))

    async def connect(self, owner: Owner) -> Peer:
        return await self.transport.connect(owner.endpoints[self.transport.name], 5.0)

    async def pull(self, peer: Peer, pairs: list[tuple[int, int]], deadline_s: float = 20.0) -> TransferResult:
        """Pull (remote, local) pairs of generation 0."""
        return await self.transport.wait(self.transport.pull(peer, copies(pairs), deadline_s))

    def page(self, page: int) -> npt.NDArray[np.uint8]:
        return self.memory.page(PageId(page))

    async def close(self) -> None:
        await self.transport.close()
        self.memory.close()


def copies(pairs: list[tuple[int, int]], generation: int = 0) -> list[PageCopy]:
    return [PageCopy(PageId(remote), PageId(local), generation) for remote, local in pairs]


def make_transport(kind: str) -> PageTransport:
    if kind == "shm":
        return ShmTransport()
    tcp = TcpTransport("127.0.0.1")
    return FakeTransport(tcp) if kind == "fake" else tcp


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("pages-")] == []


@pytest.fixture(params=["shm", "tcp", "fake"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def start_owner() -> Iterator[Callable[..., Owner]]:
    owners: list[Owner] = []

    def start(**options: Any) -> Owner:
        owners.append(Owner(**options))
        return owners[-1]

    yield start
    for owner in owners:
        owner.end()


@pytest.fixture(scope="module")
def steady_owner() -> Iterator[Owner]:
    """One that nobody harms; page 9 is in its generation 1."""
    owner = Owner(worker_id="steady")
    owner.tell("reuse 9")
    yield owner
    owner.end()


@pytest.fixture
async def make_reader(kind: str, _no_thread_is_left: None) -> AsyncIterator[Callable[..., Reader]]:
    readers: list[Reader] = []

    def make(pages: int = PAGES, page_bytes: int = PAGE_BYTES) -> Reader:
        readers.append(Reader(make_transport(kind), pages, page_bytes))
        return readers[-1]

    yield make
    for reader in readers:
        await reader.close()


@pytest.fixture
async def reader(make_reader: Callable[..., Reader]) -> Reader:
    ready = make_reader()
    await ready.open()
    return ready
