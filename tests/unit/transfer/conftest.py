"""Owners of pages in processes of their own, readers in this one."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.process_table import has_stopped
from tests.unit.transfer import page_owner
from tests.unit.transfer.makers import (
    GROUPS,
    HAS_NIXL,
    KINDS,
    all_bytes,
    fill,
    group_of,
    make_certificates,
    make_memory,
    make_transport,
)
from twostroke.base.ids import Epoch, PageId
from twostroke.kv_cache.layout import PageRegion
from twostroke.transfer.base import Identity, PageCopy, PageEndpoint, Peer, TransferResult

PAGES, PAGE_BYTES = 64, 5000


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.unit.transfer.page_owner", *(["nixl_cu12._bindings"] if HAS_NIXL else [])])


class Process:
    """Forked from one that has loaded torch already."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        self.commands, theirs = FORKS.Pipe()
        self._process = FORKS.Process(target=target, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self._pid = self._process.pid

    def freeze(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)
        while not has_stopped(self._pid):
            time.sleep(0.001)

    def thaw(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def end(self) -> None:
        self.kill()
        self._process.close()
        self.commands.close()


class Owner(Process):
    """A process that owns pages."""

    def __init__(self, **options: Any) -> None:
        self.options = {
            "group": "host",
            "worker_id": "owner",
            "incarnation": 1,
            "fingerprint": "fingerprint-a",
            "token": "secret",
            "pages": PAGES,
            "page_bytes": PAGE_BYTES,
            "further": (),
            "seed": 1,
        } | options
        self.options["kinds"] = GROUPS[self.options["group"]]
        super().__init__(page_owner.run, self.options)
        endpoints = [PageEndpoint.unpack(packed) for packed in self.commands.recv()]
        self.endpoints = {endpoint.transport: endpoint for endpoint in endpoints}
        self.layout = endpoints[0].layout

    def content(self, page: int) -> npt.NDArray[np.uint8]:
        return page_owner.content(page, self.layout.page_bytes_of(page), self.options["seed"])

    def tell(self, command: str) -> None:
        """Returns once the owner has obeyed."""
        self.commands.send(command)
        assert self.commands.recv() == "done"


class BusyReader(Process):
    """A process that pulls all pages of an owner again and again."""

    def __init__(self, kind: str, endpoint: PageEndpoint, deadline_s: float) -> None:
        super().__init__(page_owner.run_reader, kind, endpoint.pack(), deadline_s)
        assert self.commands.recv() == "reading"


class Reader:
    """A worker in this process that reads pages over one transport."""

    def __init__(self, kind: str, pages: int, page_bytes: int, *further: PageRegion) -> None:
        self.transport = make_transport(kind)
        self.memory = make_memory(group_of(kind), pages, page_bytes, *further)

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """The pages' bytes, to be read."""
        return all_bytes(self.memory)

    def fill(self, value: int) -> None:
        """Every byte."""
        content = np.full(self.memory.page_bytes, value, np.uint8)
        fill(self.memory, range(self.memory.pages + 1), lambda _: content)

    async def open(self, **changes: Any) -> PageEndpoint:
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
        """Pulls (remote, local) pairs of generation 0."""
        return await self.transport.wait(self.transport.pull(peer, copies(pairs), deadline_s))

    def page(self, page: int) -> npt.NDArray[np.uint8]:
        """The bytes of a page of any group."""
        with contextlib.closing(self.memory.access(1)) as access:
            return np.frombuffer(bytes(next(access.read([[page]]))[0]), np.uint8)

    async def close(self) -> None:
        await self.transport.close()
        self.memory.close()


def copies(pairs: list[tuple[int, int]], generation: int = 0) -> list[PageCopy]:
    return [PageCopy(PageId(remote), PageId(local), generation) for remote, local in pairs]


@pytest.fixture(scope="session", autouse=True)
def _certificates(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Before the first process is forked."""
    make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = set(threading.enumerate()) - before
    assert [thread.name for thread in left if thread.name.startswith("pages-")] == []


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def two_in_one_process(kind: str) -> None:
    """For tests whose owner is not a process of its own."""
    if kind == "cuda_ipc-gpu":
        pytest.skip("CUDA opens no memory of its own process")


@pytest.fixture
def group(request: pytest.FixtureRequest) -> str:
    """The group of the owners that a test speaks to."""
    return group_of(request.getfixturevalue("kind")) if "kind" in request.fixturenames else "host"


@pytest.fixture
def start_owner(group: str) -> Iterator[Callable[..., Owner]]:
    owners: list[Owner] = []

    def start(**options: Any) -> Owner:
        owners.append(Owner(group=group, **options))
        return owners[-1]

    yield start
    for owner in owners:
        owner.end()


@pytest.fixture
def start_busy_reader(kind: str) -> Iterator[Callable[..., BusyReader]]:
    readers: list[BusyReader] = []

    def start(endpoint: PageEndpoint, deadline_s: float) -> BusyReader:
        readers.append(BusyReader(kind, endpoint, deadline_s))
        return readers[-1]

    yield start
    for reader in readers:
        reader.end()


@pytest.fixture(scope="module")
def steady_owners() -> Iterator[dict[str, Owner]]:
    owners: dict[str, Owner] = {}
    yield owners
    for owner in owners.values():
        owner.end()


@pytest.fixture
def steady_owner(group: str, steady_owners: dict[str, Owner]) -> Owner:
    """One that nobody harms; page 9 is in its generation 1."""
    if group not in steady_owners:
        steady_owners[group] = Owner(group=group, worker_id="steady")
        steady_owners[group].tell("reuse 9")
    return steady_owners[group]


@pytest.fixture
async def make_reader(kind: str, _no_thread_is_left: None) -> AsyncIterator[Callable[..., Reader]]:
    readers: list[Reader] = []

    def make(pages: int = PAGES, page_bytes: int = PAGE_BYTES, *further: PageRegion) -> Reader:
        readers.append(Reader(kind, pages, page_bytes, *further))
        return readers[-1]

    yield make
    for reader in readers:
        await reader.close()


@pytest.fixture
async def reader(make_reader: Callable[..., Reader]) -> Reader:
    ready = make_reader()
    await ready.open()
    return ready
