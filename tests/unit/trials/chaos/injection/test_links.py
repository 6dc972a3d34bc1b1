"""Links that go bad, over real sockets: what was sent and what arrived."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.trials.chaos.injection.links import PAGE_CHUNK_BYTES, SLOW_S, Links
from tests.trials.chaos.injection.plan import Fault, Kind
from twostroke.base.fault_points import Point

PAGE = bytes(range(256)) * 16
PATIENCE_S = 30.0
FOREVER_S = 3600.0


class Owner:
    """Listens; answers every byte that it gets with a page."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.asked = threading.Semaphore(0)
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE_S)
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                while connection.recv(1):
                    self.asked.release()
                    connection.sendall(PAGE)
            except OSError:
                return


@pytest.fixture
def owner() -> Iterator[Owner]:
    serving = Owner()
    yield serving
    serving.close()


@pytest.fixture
def links() -> Iterator[Links]:
    made = Links(lambda fault: None)
    yield made
    made.heal()
    made.close()


@pytest.fixture(params=["announced", "dialled", "carried"])
def reader(request: pytest.FixtureRequest, owner: Owner, links: Links) -> Iterator[socket.socket]:
    """Connected to the owner through its proxy, or through the reader's own."""
    match request.param:
        case "announced":
            connected = connect(links.announce(owner.address, pages=True))
        case "dialled":
            connected = connect(links.dial(owner.address))
        case _:
            connected = links.carry(connect(owner.address))
            connected.settimeout(PATIENCE_S)
    with connected:
        yield connected


@pytest.fixture
def page_reader(owner: Owner, links: Links) -> Iterator[socket.socket]:
    with connect(links.announce(owner.address, pages=True)) as connected:
        yield connected


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), PATIENCE_S)


def fault(kind: Kind, seconds: float = FOREVER_S) -> Fault:
    return Fault(Point.PAGES_ANNOUNCING, kind, 1, seconds)


def receive(sock: socket.socket, size: int) -> bytes:
    """`size` bytes, or what there is before the end."""
    got = b""
    while len(got) < size and (chunk := sock.recv(size - len(got))):
        got += chunk
    return got


def ask(sock: socket.socket) -> bytes:
    sock.sendall(b"?")
    return receive(sock, len(PAGE))


def test_a_good_link_passes_everything_and_the_end(reader: socket.socket, owner: Owner) -> None:
    assert ask(reader) == ask(reader) == PAGE
    reader.shutdown(socket.SHUT_WR)
    assert reader.recv(1) == b""


def test_a_partition_holds_back_both_ways_and_delivers_late(reader: socket.socket, links: Links, owner: Owner) -> None:
    assert ask(reader) == PAGE
    assert owner.asked.acquire(timeout=PATIENCE_S)
    links.spoil(fault(Kind.PARTITION))
    reader.sendall(b"??")
    assert not owner.asked.acquire(timeout=0.1), "it passed the partition"
    links.heal()
    assert receive(reader, 2 * len(PAGE)) == 2 * PAGE


def test_a_partition_ends_by_itself_and_new_connections_hang_meanwhile(owner: Owner, links: Links) -> None:
    address = links.announce(owner.address, pages=True)
    links.spoil(fault(Kind.PARTITION, 0.2))
    started_s = time.monotonic()
    with connect(address) as late:
        assert ask(late) == PAGE
    assert time.monotonic() - started_s >= 0.2


def test_an_end_during_a_partition_is_not_heard_of_before_it_is_over(page_reader: socket.socket, links: Links) -> None:
    assert ask(page_reader) == PAGE
    links.spoil(fault(Kind.PARTITION))
    page_reader.shutdown(socket.SHUT_WR)
    page_reader.settimeout(0.1)
    with pytest.raises(TimeoutError):
        page_reader.recv(1)
    page_reader.settimeout(PATIENCE_S)
    links.heal()
    assert page_reader.recv(1) == b""


def test_a_slow_link_delays_every_chunk_until_it_is_over(reader: socket.socket, links: Links) -> None:
    links.spoil(fault(Kind.SLOW))
    started_s = time.monotonic()
    assert ask(reader) == PAGE
    assert time.monotonic() - started_s >= 2 * SLOW_S
    links.heal()
    assert ask(reader) == PAGE


@pytest.mark.parametrize("side", ["announced", "carried"])
def test_one_bit_of_a_page_is_flipped_once(side: str, owner: Owner, links: Links) -> None:
    reader = connect(links.announce(owner.address, pages=True)) if side == "announced" else None
    with reader or links.carry(connect(owner.address)) as sock:
        links.spoil(fault(Kind.CORRUPT))
        damaged = ask(sock)
        wrong = [index for index in range(len(PAGE)) if damaged[index] != PAGE[index]]
        assert len(damaged) == len(PAGE)
        assert len(wrong) == 1
        assert wrong[0] > PAGE_CHUNK_BYTES // 2
        assert (damaged[wrong[0]] ^ PAGE[wrong[0]]).bit_count() == 1
        assert ask(sock) == PAGE


def test_a_truncated_page_is_the_connections_last(page_reader: socket.socket, links: Links) -> None:
    links.spoil(fault(Kind.TRUNCATE))
    arrived = ask(page_reader)
    assert 0 < len(arrived) < len(PAGE)
    assert PAGE.startswith(arrived)


def test_a_duplicated_chunk_comes_twice(page_reader: socket.socket, links: Links) -> None:
    links.spoil(fault(Kind.DUPLICATE))
    page_reader.sendall(b"?")
    assert receive(page_reader, 2 * len(PAGE)) == 2 * PAGE


def test_only_pages_are_spoilt(owner: Owner, links: Links) -> None:
    """Rpc messages have gRPC's word for it that they are whole; it is pages whose bytes nobody else checks."""
    with connect(links.announce(owner.address)) as rpc:
        links.spoil(fault(Kind.CORRUPT))
        assert ask(rpc) == PAGE
    assert links.take_corruption()
    assert not links.take_corruption()


def test_a_proxy_has_the_port_that_it_was_given_and_an_end(owner: Owner, links: Links) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert links.announce(owner.address, port=port) == f"127.0.0.1:{port}"
    dialled = links.dial(owner.address)
    links.hang_up(dialled)
    with pytest.raises(ConnectionRefusedError):
        connect(dialled)


def test_nobody_behind_a_proxy_is_a_connection_that_ends(links: Links) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with connect(links.dial(address)) as sock:
        assert sock.recv(1) == b""
