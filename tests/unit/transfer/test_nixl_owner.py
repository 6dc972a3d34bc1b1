"""The owner's end of NIXL page connections, with an agent that writes nowhere: what readers may ask it for."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest

from twostroke.base.errors import PeerLost
from twostroke.base.ids import Epoch, PageId
from twostroke.kv_cache.layout import PoolLayout
from twostroke.kv_cache.memory import PageMemory, PoolLocation
from twostroke.transfer.base import Identity, PageEndpoint
from twostroke.transfer.network.nixl import serve_writes
from twostroke.transfer.network.nixl_agent import Agent, RemotePages
from twostroke.transfer.sockets.frames import Deadline, receive_frame, send_frame
from twostroke.transfer.sockets.handshake import ReaderValidator, introduce

PAGES, READER_PAGES, PAGE_BYTES = 8, 5, 64


def counts_of(*pages: int) -> bytes:
    """Says how many pages a reader has in each group."""
    return np.array(pages, "<u4").tobytes()


OWNER = Identity("owner", Epoch(1, 7), "fingerprint", "secret")
READER = Identity("reader", Epoch(1, 8), "fingerprint", "secret")
ENTRY = [b"metadata", 4096, 1, counts_of(READER_PAGES)]


class RecordingAgent:
    def __init__(self) -> None:
        self.added: list[Any] = []
        self.written: list[Any] = []
        self.removed: list[str] = []
        self.meanwhile: Callable[[], object] = lambda: None

    def add(self, metadata: bytes, place: PoolLocation, layout: PoolLayout) -> RemotePages:
        self.added.append((metadata, place, layout))
        return RemotePages("reader's agent", 3)

    def remove(self, remote: RemotePages) -> None:
        self.removed.append(remote.agent)

    def write(self, pages: Any, remote: RemotePages, remote_pages: Any, deadline: Deadline, is_wanted: Any) -> None:
        assert is_wanted()
        self.meanwhile()
        self.written.append((pages.tolist(), remote.handle, remote_pages.tolist()))


class Served:
    def __init__(self) -> None:
        self.memory = PageMemory(PAGES, PAGE_BYTES)
        self.agent = RecordingAgent()
        self.sock, theirs = a_connection()
        validator = ReaderValidator(OWNER, PoolLayout.of(PAGES, PAGE_BYTES))
        self.ending: list[BaseException] = []
        self._thread = threading.Thread(target=self._serve, args=(theirs, validator))
        self._thread.start()

    def enter(self, entry: list[Any]) -> None:
        endpoint = PageEndpoint("nixl", "pair", "here", OWNER.epoch, "fingerprint", PoolLayout.of(PAGES, PAGE_BYTES))
        introduce(self.sock, READER, endpoint, Deadline.after(5.0))
        send_frame(self.sock, entry, Deadline.after(5.0))

    def ask(self, pages: list[int], into: list[int], generations: list[int] | None = None) -> str:
        counts = generations or [0] * len(pages)
        ids = [np.array(row, "<u4").tobytes() for row in (pages, into)]
        send_frame(self.sock, [5.0, *ids, np.array(counts, "<u8").tobytes()], Deadline.after(5.0))
        (reason,) = receive_frame(self.sock, 4096, Deadline.after(5.0))
        return str(reason)

    def end(self) -> str:
        """Hang up; how the owner took it."""
        self.sock.close()
        self._thread.join()
        return type(self.ending[0]).__name__

    def _serve(self, sock: socket.socket, validator: ReaderValidator) -> None:
        with sock:
            try:
                validator.admit(sock, Deadline.after(5.0))
                serve_writes(sock, self.memory, cast(Agent, self.agent))
            except BaseException as error:
                self.ending.append(error)


def a_connection() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ours = socket.create_connection(listening.getsockname())
        return ours, listening.accept()[0]


@pytest.fixture
def served() -> Iterator[Served]:
    ready = Served()
    yield ready
    if not ready.ending:
        ready.end()
    ready.memory.close()


def test_pages_are_written_where_the_reader_wants_them(served: Served) -> None:
    served.enter(ENTRY)
    assert receive_frame(served.sock, 64, None) == []
    assert served.ask([7, 0], [1, 4]) == ""
    assert served.agent.added == [(b"metadata", PoolLocation(4096, 1), PoolLayout.of(READER_PAGES, PAGE_BYTES))]
    assert served.agent.written == [([7, 0], 3, [1, 4])]
    assert served.end() == "EOFError"
    assert served.agent.removed == ["reader's agent"]


def test_a_page_of_another_generation_is_not_written(served: Served) -> None:
    served.memory.begin_new_generation(PageId(2))
    served.enter(ENTRY)
    receive_frame(served.sock, 64, None)
    assert served.ask([1, 2], [0, 1]) == "page 2 has generation 1, not 0"
    assert served.agent.written == []
    assert served.ask([1, 2], [0, 1], [0, 1]) == ""


def test_a_page_that_is_reused_while_it_is_written_is_told(served: Served) -> None:
    served.agent.meanwhile = lambda: served.memory.begin_new_generation(PageId(2))
    served.enter(ENTRY)
    receive_frame(served.sock, 64, None)
    assert served.ask([2], [0]) == "page 2 has generation 1, not 0"


@pytest.mark.parametrize(("pages", "into"), [([8], [0]), ([0], [5]), ([0, 1], [0]), ([], []), ([0] * 4097, [0] * 4097)])
def test_pages_that_are_not_there_end_the_connection(served: Served, pages: list[int], into: list[int]) -> None:
    served.enter(ENTRY)
    receive_frame(served.sock, 64, None)
    with pytest.raises((EOFError, OSError)):
        served.ask(pages, into)
    assert served.end() == "InvalidRequest"
    assert served.agent.written == []
    assert served.agent.removed == ["reader's agent"]


@pytest.mark.parametrize(
    "entry",
    [
        [],
        [b"m", 1, counts_of(1)],
        [b"m", -1, 0, counts_of(1)],
        [b"m", 0, -2, counts_of(1)],
        [b"m", 0, 0, counts_of(0)],
        [b"m", 0, 0, counts_of((1 << 32) - 1)],
        [b"m", 0, 0, counts_of(1, 1)],
        [b"m", 0, 0, b"odd"],
        ["m", 0, 0, counts_of(1)],
    ],
)
def test_an_entry_that_is_none_ends_the_connection(served: Served, entry: list[Any]) -> None:
    served.enter(entry)
    with pytest.raises((EOFError, OSError)):
        receive_frame(served.sock, 64, None)
    assert served.end() == "InvalidRequest"
    assert served.agent.added == []


def test_a_reader_whose_agent_cannot_be_reached_is_hung_up_on(served: Served) -> None:
    def fail(*_: object) -> RemotePages:
        raise PeerLost("nixl: the reader's agent cannot be reached")

    served.agent.add = fail  # type: ignore[method-assign]
    with contextlib.suppress(OSError):
        served.enter(ENTRY)
    with pytest.raises((EOFError, OSError)):
        receive_frame(served.sock, 64, None)
    assert served.end() == "PeerLost"
