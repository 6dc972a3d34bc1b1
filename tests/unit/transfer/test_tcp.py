"""What strangers and broken peers can do to a TCP owner of pages: nothing."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from twostroke.base.credentials import prove
from twostroke.base.errors import (
    ConfigError,
    FingerprintMismatch,
    PeerLost,
    ServeError,
    StaleEpoch,
    TransferFailed,
    Unauthenticated,
)
from twostroke.base.ids import Epoch, PageId
from twostroke.kv_cache.layout import PoolLayout
from twostroke.kv_cache.memory import PageMemory
from twostroke.transfer.base import Identity, PageCopy, PageEndpoint, ReadOutcome
from twostroke.transfer.network.connection import MAX_PAGES, ConnectionPeer
from twostroke.transfer.network.tcp import TcpConnection, TcpTransport
from twostroke.transfer.sockets.handshake import PROTOCOL

PAGES, PAGE_BYTES = 4, 1000
OWNER = Identity("owner", Epoch(1, 7), "fingerprint", "secret")
READER = Identity("reader", Epoch(1, 8), "fingerprint", "secret")


@dataclass
class Served:
    transport: TcpTransport
    memory: PageMemory
    endpoint: PageEndpoint

    def dial(self) -> socket.socket:
        host, _, port = self.endpoint.address.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=60)


@contextlib.asynccontextmanager
async def serving(page_bytes: int = PAGE_BYTES) -> AsyncIterator[Served]:
    memory = PageMemory(PAGES, page_bytes)
    memory.data[:] = np.arange(PAGES + 1, dtype=np.uint8)[:, None] + 1
    transport = TcpTransport("127.0.0.1")
    try:
        yield Served(transport, memory, await transport.open(memory, OWNER))
    finally:
        await transport.close()
        memory.close()


def frame(fields: Any) -> bytes:
    body = msgpack.packb(fields)
    return struct.pack("!I", len(body)) + body


NONCE = bytes(16)
"""What both sides draw here, so that a handshake can be written before the owner has spoken."""
GREETING = frame([PROTOCOL, NONCE])


@pytest.fixture(autouse=True, scope="module")
def no_nonces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("twostroke.transfer.sockets.handshake.draw_nonce", lambda: NONCE)
        yield


def handshake(**changes: str) -> bytes:
    facts = {
        "protocol": PROTOCOL,
        "token": "secret",
        "worker": "reader",
        "epoch": str(READER.epoch),
        "fingerprint": "fingerprint",
        "meant": str(OWNER.epoch),
    }
    protocol, token, *said = (facts | changes).values()
    proof = prove(token, "pages reader", NONCE, NONCE, protocol, *said)
    return frame([protocol, NONCE, *said, proof])


def request(pages: list[int], generations: list[int] | None = None, seconds: float = 5.0) -> bytes:
    counts = generations or [0] * len(pages)
    return frame([seconds, np.array(pages, "<u4").tobytes(), np.array(counts, "<u8").tobytes()])


def all_that_comes(sock: socket.socket, sent: bytes) -> bytes:
    """Sends, say no more, and reads until the owner hangs up."""
    answer = b""
    with sock, contextlib.suppress(ConnectionError):
        sock.sendall(sent)
        with contextlib.suppress(OSError):  # the owner may have hung up already
            sock.shutdown(socket.SHUT_WR)
        while part := sock.recv(65536):
            answer += part
    return answer


def read_frame(data: bytes) -> list[Any]:
    (length,) = struct.unpack("!I", data[:4])
    fields: list[Any] = msgpack.unpackb(data[4 : 4 + length])
    return fields


async def test_the_owner_says_who_it_is_and_sends_what_is_asked_for() -> None:
    async with serving() as served:
        answer = all_that_comes(served.dial(), handshake() + request([2, 0]))
    said = ["owner", str(OWNER.epoch), "fingerprint", PAGES, PAGE_BYTES]
    welcome = frame(["welcome", prove("secret", "pages owner", NONCE, NONCE, *map(str, said)), *said])
    assert answer == GREETING + welcome + b"\0" + b"\3" * PAGE_BYTES + b"\1" * PAGE_BYTES + b"\0"


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"token": "guess"}, Unauthenticated),
        ({"token": "", "protocol": "other/9"}, Unauthenticated),
        ({"protocol": "other/9"}, FingerprintMismatch),
        ({"fingerprint": "else"}, FingerprintMismatch),
        ({"meant": "1.6"}, StaleEpoch),
        ({"meant": "0.7"}, StaleEpoch),
        ({"meant": "1.8"}, StaleEpoch),
        ({"meant": "2.7"}, StaleEpoch),
    ],
)
async def test_a_refusal_is_typed_counted_and_ends_the_connection(
    changes: dict[str, str], error: type[ServeError]
) -> None:
    async with serving() as served:
        answer = all_that_comes(served.dial(), handshake(**changes) + request([0]))
        assert served.transport.refused == {error.label(): 1}
    fields = read_frame(answer.removeprefix(GREETING))
    assert fields[:2] == ["refused", error.__name__]
    assert answer == GREETING + frame(fields)
    assert "secret" not in fields[2]


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        struct.pack("!I", 0),
        struct.pack("!I", 1 << 31),
        frame({"token": "secret"}),
        frame(["a"] * 5),
        frame([PROTOCOL, "secret", "reader", str(READER.epoch), "fingerprint", str(OWNER.epoch)]),
        frame(["a", "b", "c", "d", "e", 6]),
        handshake(epoch="not an epoch"),
        handshake(meant="x.y"),
        b"\0\0\0\5\xdd\xff\xff\xff\xff",
    ],
)
async def test_a_stranger_that_speaks_garbage_gets_no_answer(garbage: bytes) -> None:
    async with serving() as served:
        assert all_that_comes(served.dial(), garbage) in (GREETING, b"")


@pytest.mark.parametrize(
    "garbage",
    [
        request([PAGES]),
        request([2**32 - 1]),
        request([]),
        request([0] * 4097),
        request([0, 1], [0]),
        request([0], seconds=-1.0),
        request([0], seconds=float("nan")),
        request([0], seconds=float("inf")),
        frame([5.0, b"abc", b"abcdef"]),
        frame([5, b"\0" * 4, b"\0" * 8]),
        struct.pack("!I", 1 << 20),
    ],
)
async def test_a_request_out_of_bounds_ends_the_connection_without_a_page(garbage: bytes) -> None:
    async with serving() as served:
        welcome = all_that_comes(served.dial(), handshake())
        assert all_that_comes(served.dial(), handshake() + garbage + request([0])) == welcome


async def test_a_page_that_is_reused_while_it_is_sent_is_reported() -> None:
    async with serving(page_bytes=32 << 20) as served:
        welcome = all_that_comes(served.dial(), handshake())
        with served.dial() as sock:
            sock.settimeout(None)  # with a timeout MSG_WAITALL does not wait
            sock.sendall(handshake() + request([1, 2]))
            begun = sock.recv(len(welcome) + 1, socket.MSG_WAITALL)
            assert begun == welcome + b"\0"  # the owner is now stuck in the middle of page 1: buffers hold less
            served.memory.begin_new_generation(PageId(1))
            left = served.memory.page_bytes
            while left:
                left -= len(sock.recv(min(left, 1 << 20)))
            assert sock.recv(1) == b"\1"
            (length,) = struct.unpack("!I", sock.recv(4, socket.MSG_WAITALL))
            reason = msgpack.unpackb(sock.recv(length, socket.MSG_WAITALL))
    assert reason == ["page 1 has generation 1, not 0"]


async def test_a_pull_of_more_pages_than_one_request_may_have_brings_them_all() -> None:
    pages = MAX_PAGES + 100
    ours, theirs = PageMemory(pages, 8), PageMemory(pages, 8)
    theirs.data[:] = np.arange(pages + 1, dtype=np.uint64)[:, None].view(np.uint8)
    owner, reader = TcpTransport("127.0.0.1"), TcpTransport("127.0.0.1")
    try:
        endpoint = await owner.open(theirs, OWNER)
        reader.read_into(ours, READER)
        peer = await reader.connect(endpoint, 10.0)
        copies = [PageCopy(PageId(pages - 1 - page), PageId(page), 0) for page in range(pages)]
        result = await reader.wait(reader.pull(peer, copies, 10.0))
        assert (result.outcome, result.copied_bytes) == (ReadOutcome.DONE, 8 * pages)
        assert (ours.data[:pages] == theirs.data[:pages][::-1]).all()
    finally:
        for transport in (reader, owner):
            await transport.close()
        for memory in (ours, theirs):
            memory.close()


async def test_a_reader_that_stops_reading_loses_its_connection_at_its_deadline() -> None:
    async with serving(page_bytes=32 << 20) as served:
        with served.dial() as sock:
            sock.sendall(handshake() + request([1], seconds=0.2))
            await asyncio.sleep(0.5)
            received = 0
            with contextlib.suppress(ConnectionError):
                while part := sock.recv(1 << 20):
                    received += len(part)
        assert received < served.memory.page_bytes


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prefix=st.sampled_from([b"", handshake(), handshake() + request([1]), handshake()[:20]]),
    garbage=st.one_of(
        st.binary(max_size=200),
        st.binary(max_size=60).map(lambda body: struct.pack("!I", len(body)) + body),
        st.lists(st.one_of(st.floats(), st.binary(max_size=24), st.integers(0, 9)), max_size=4).map(frame),
    ),
)
def test_no_bytes_change_a_page_or_stop_the_service(
    fuzzed: Callable[[bytes], None], prefix: bytes, garbage: bytes
) -> None:
    fuzzed(prefix + garbage)


@pytest.fixture
def fuzzed() -> Any:
    """One server and one true reader for all examples: sends bytes, then checks both pools and a pull."""
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()

        async def start() -> tuple[Served, TcpTransport, PageMemory, Any]:
            served = await stack.enter_async_context(serving())
            memory = PageMemory(PAGES, PAGE_BYTES)
            stack.callback(memory.close)
            reader = TcpTransport("127.0.0.1")
            await reader.open(memory, READER)
            stack.push_async_callback(reader.close)
            return served, reader, memory, await reader.connect(served.endpoint, 5.0)

        served, reader, memory, peer = runner.run(start())
        pages, generations = served.memory.data.copy(), served.memory.generations.copy()

        async def still_serves() -> None:
            memory.data[:] = 0
            result = await reader.wait(reader.pull(peer, [PageCopy(PageId(3), PageId(0), 0)], 5.0))
            assert result.outcome is ReadOutcome.DONE, result
            assert (memory.page(PageId(0)) == 4).all()
            assert not memory.data[1:].any()

        def send(data: bytes) -> None:
            all_that_comes(served.dial(), data)
            assert np.array_equal(served.memory.data, pages)
            assert np.array_equal(served.memory.generations, generations)
            runner.run(still_serves())

        yield send
        runner.run(stack.aclose())


async def test_a_listener_that_speaks_something_else_is_no_peer() -> None:
    async def chatter(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-something else entirely\r\n" * 10)
        await writer.drain()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(chatter, "127.0.0.1", 0)
    async with server, serving() as served:
        port = server.sockets[0].getsockname()[1]
        elsewhere = replace(served.endpoint, address=f"127.0.0.1:{port}")
        with pytest.raises(PeerLost, match=f"failed the handshake of {PROTOCOL}"):
            await served.transport.connect(elsewhere, 5.0)


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        (frame(["other/9", NONCE]), FingerprintMismatch, "speaks 'other/9', this reader"),
        (GREETING + frame(["welcome", bytes(32), "owner", str(OWNER.epoch), "fingerprint"]), PeerLost, "token"),
    ],
)
async def test_a_reader_says_of_an_owner_what_is_wrong_with_it(
    answer: bytes, error: type[ServeError], said: str
) -> None:
    async def owner(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(owner, "127.0.0.1", 0)
    async with server, serving() as served:
        elsewhere = replace(served.endpoint, address=f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        with pytest.raises(error, match=said) as refused:
            await served.transport.connect(elsewhere, 5.0)
    assert "does not speak" not in refused.value.message


async def test_a_connection_whose_local_pages_fail_is_not_busy_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as served:
        peer = await served.transport.connect(served.endpoint, 5.0)

        def fail(self: TcpConnection) -> None:
            raise TransferFailed("the device has failed")

        monkeypatch.setattr(TcpConnection, "synchronize", fail)
        with pytest.raises(TransferFailed, match="the device has failed"):
            await served.transport.wait(served.transport.pull(peer, [PageCopy(PageId(1), PageId(0), 0)], 5.0))
        assert isinstance(peer, ConnectionPeer)
        assert not peer.is_busy


async def test_a_reader_hangs_up_at_its_deadline_without_being_fenced() -> None:
    hung_up = asyncio.Event()

    async def stall(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING)
        (length,) = struct.unpack("!I", await reader.readexactly(4))
        said = ["owner", str(OWNER.epoch), "fingerprint", PAGES, PAGE_BYTES]
        readers = msgpack.unpackb(await reader.readexactly(length))[1]
        proof = prove("secret", "pages owner", NONCE, readers, *map(str, said))
        writer.write(frame(["welcome", proof, *said]) + b"\0" + b"half a page")
        with contextlib.suppress(ConnectionError):
            await reader.read()
        hung_up.set()
        writer.close()

    server = await asyncio.start_server(stall, "127.0.0.1", 0)
    async with server, serving() as served:
        port = server.sockets[0].getsockname()[1]
        peer = await served.transport.connect(replace(served.endpoint, address=f"127.0.0.1:{port}"), 5.0)
        transfer = served.transport.pull(peer, [PageCopy(PageId(0), PageId(0), 0)], 0.2)
        assert (await served.transport.wait(transfer)).outcome is ReadOutcome.EXPIRED
        async with asyncio.timeout(60):
            await hung_up.wait()


async def test_addresses_that_lead_nowhere_are_lost_peers() -> None:
    async with serving() as served:
        for address in (
            "127.0.0.1:1",
            "nowhere.invalid:5",
            "no port",
            "127.0.0.1:99999999",
            "",
            "\0:5",
            "x" * 70 + ":5",
        ):
            with pytest.raises(PeerLost, match="pages at tcp"):
                await served.transport.connect(replace(served.endpoint, address=address), 5.0)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_a_wildcard_is_not_an_address_for_peers(host: str) -> None:
    with pytest.raises(ConfigError, match="interface") as refused:
        TcpTransport(host)
    assert refused.value.field == "host"


async def test_a_host_that_is_not_ours_is_a_config_error() -> None:
    memory = PageMemory(1, 10)
    with pytest.raises(ConfigError, match="cannot listen on"):
        await TcpTransport("192.0.2.1").open(memory, OWNER)
    memory.close()


async def test_ipv6_addresses_work() -> None:
    owner, reader = TcpTransport("::1"), TcpTransport("::1")
    memories = [PageMemory(PAGES, PAGE_BYTES) for _ in range(2)]
    memories[0].data[:] = 9
    try:
        endpoint = await owner.open(memories[0], OWNER)
        await reader.open(memories[1], READER)
        peer = await reader.connect(endpoint, 5.0)
        result = await reader.wait(reader.pull(peer, [PageCopy(PageId(1), PageId(2), 0)], 5.0))
    finally:
        await reader.close()
        await owner.close()
    assert result.outcome is ReadOutcome.DONE
    assert (memories[1].page(PageId(2)) == 9).all()
    for memory in memories:
        memory.close()


def test_loopback_is_reached_from_the_same_host_only() -> None:
    transport = TcpTransport("127.0.0.1")
    endpoint = PageEndpoint("tcp", "127.0.0.1:5", "another boot/1", Epoch(1, 1), "fingerprint", PoolLayout.of(1, 1))
    assert not transport.reaches(endpoint)
    assert transport.reaches(replace(endpoint, address="10.0.0.7:5"))
    assert transport.reaches(replace(endpoint, address="worker-7.pages:5"))
    assert not transport.reaches(replace(endpoint, address="[::1]:5"))
    assert not transport.reaches(replace(endpoint, address="10.0.0.7:5", transport="shm"))


@contextlib.asynccontextmanager
async def behind_a_link(served: Served, pause_s: float) -> AsyncIterator[tuple[PageEndpoint, asyncio.Event]]:
    """What the owner sends comes 200 bytes at a time; while the event is clear, nothing comes."""
    flows = asyncio.Event()
    flows.set()
    host, _, port = served.endpoint.address.rpartition(":")

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, pause_s: float) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(200):
                await flows.wait()
                await asyncio.sleep(pause_s)
                sink.write(data)
        sink.close()

    async def join(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        theirs, to_owner = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pump(source, to_owner, 0.0), pump(theirs, sink, pause_s))

    server = await asyncio.start_server(join, "127.0.0.1", 0)
    port_of_link = server.sockets[0].getsockname()[1]
    yield replace(served.endpoint, address=f"127.0.0.1:{port_of_link}"), flows
    flows.set()
    server.close()


async def test_a_slow_link_is_waited_for_and_one_that_stands_still_fails_all_that_wait_for_it() -> None:
    """Two pulls have a connection each; the others learn from those."""
    stall_s = 0.3
    reader, memory = TcpTransport("127.0.0.1", stall_s), PageMemory(16, PAGE_BYTES)
    async with serving() as served, behind_a_link(served, pause_s=stall_s / 10) as (endpoint, flows):
        await reader.open(memory, READER)
        peer = await reader.connect(endpoint, 30.0)
        pulls = [PageCopy(PageId(page), PageId(page), 0) for page in range(PAGES)]
        slow = await reader.wait(reader.pull(peer, pulls, 30.0))
        assert slow.outcome is ReadOutcome.DONE, slow
        assert slow.seconds > stall_s
        flows.clear()
        begun = [reader.pull(peer, [PageCopy(PageId(0), PageId(page), 0)], 30.0) for page in range(8)]
        ended = await asyncio.gather(*map(reader.wait, begun))
        assert [result.outcome for result in ended].count(ReadOutcome.EXPIRED) == 2
        assert sum("made no progress while this pull waited" in result.reason for result in ended) == 6
        for each in begun:
            await reader.fence(each)
        flows.set()
        again = await reader.wait(reader.pull(await reader.connect(endpoint, 30.0), pulls[:1], 30.0))
        assert again.outcome is ReadOutcome.DONE, again
        await reader.close()
    memory.close()
