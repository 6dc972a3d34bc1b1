"""The door to pages, by any transport: strangers keep nobody out, and whoever is shown out is counted."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.trials.chaos.fuzz.mutate import frame
from twostroke.base.ids import Epoch, PageId
from twostroke.kv_cache.memory import PageMemory
from twostroke.security.trusted_paths import private_folder
from twostroke.transfer.base import SOCKETS, Identity, PageCopy, PageEndpoint, ReadOutcome
from twostroke.transfer.copy_thread_transport import CopyThreadTransport
from twostroke.transfer.network.tcp import TcpTransport
from twostroke.transfer.same_host.shm import ShmTransport
from twostroke.transfer.sockets import listener
from twostroke.transfer.sockets.handshake import PROTOCOL, reader_frame

OWNER = Identity("owner", Epoch(1, 7), "f", "secret")
READER = Identity("reader", Epoch(1, 8), "f", "secret")
NONCE = bytes(16)
GREETING = frame([PROTOCOL, NONCE])


def shown(token: str = "secret", fingerprint: str = "f", meant: Epoch = OWNER.epoch) -> bytes:
    """A reader's handshake."""
    return frame(reader_frame(Identity("other", READER.epoch, fingerprint, token), meant, NONCE, NONCE))


HANDSHAKE = shown()


@dataclass
class Listening:
    owner: CopyThreadTransport[Any, Any]
    reader: CopyThreadTransport[Any, Any]
    endpoint: PageEndpoint

    def knock(self, said: bytes = b"") -> socket.socket:
        if self.owner.name == "shm":
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(str(private_folder(SOCKETS) / self.endpoint.address))
        else:
            host, _, port = self.endpoint.address.rpartition(":")
            sock = socket.create_connection((host, int(port)))
        try:
            sock.settimeout(60.0)
            sock.recv(len(GREETING), socket.MSG_WAITALL)
            if said:
                sock.sendall(said)
        except BaseException:
            sock.close()
            raise
        return sock

    async def pulls(self) -> bool:
        peer = await self.reader.connect(self.endpoint, 20.0)
        transfer = self.reader.pull(peer, [PageCopy(PageId(1), PageId(0), 0)], 20.0)
        return (await self.reader.wait(transfer)).outcome is ReadOutcome.DONE

    async def shows_out(self, reason: str, count: int = 1) -> None:
        async with asyncio.timeout(60):
            while self.owner.refused.get(reason, 0) < count:
                await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def no_nonces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostroke.transfer.sockets.handshake.draw_nonce", lambda: NONCE)


@pytest.fixture(params=[lambda: TcpTransport("127.0.0.1"), ShmTransport], ids=["tcp", "shm"])
async def listening(request: pytest.FixtureRequest) -> AsyncIterator[Listening]:
    memories = [PageMemory(2, 64), PageMemory(2, 64)]
    owner, reader = request.param(), request.param()
    endpoint = await owner.open(memories[0], OWNER)
    await reader.open(memories[1], READER)
    yield Listening(owner, reader, endpoint)
    for each in (reader, owner):
        await each.close()
    for memory in memories:
        memory.close()


async def test_silent_strangers_keep_nobody_out(listening: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_S", 600.0)
    with contextlib.ExitStack() as strangers:
        first = strangers.enter_context(listening.knock())
        for _ in range(listener.MAX_STRANGERS + 5):
            strangers.enter_context(listening.knock(HANDSHAKE[:9]))
        await listening.shows_out("crowded", 6)
        assert first.recv(1) == b""
        assert await listening.pulls()


async def test_admitted_readers_are_not_strangers(listening: Listening) -> None:
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(listening.knock(HANDSHAKE)) for _ in range(3)]
        for sock in readers:
            assert b"welcome" in sock.recv(4096)
        for _ in range(listener.MAX_STRANGERS + 1):
            stack.enter_context(listening.knock())
        await listening.shows_out("crowded")
        for sock in readers:
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                assert sock.recv(4096), "an admitted reader was closed"


async def test_a_hello_that_does_not_come_in_time_ends_the_connection(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_S", 0.1)
    with listening.knock(HANDSHAKE[:-1]) as sock:
        await listening.shows_out("slow")
        assert sock.recv(1) == b""


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"GET / HTTP/1.1\r\n", "garbage"),
        (HANDSHAKE + b"\xff" * 64, "garbage"),
        (shown(token="guess?"), "unauthenticated"),
        (shown(meant=Epoch(1, 9)), "stale_epoch"),
        (shown(fingerprint="g"), "fingerprint_mismatch"),
    ],
)
async def test_whoever_is_shown_out_is_counted_by_reason(listening: Listening, said: bytes, reason: str) -> None:
    with listening.knock(said):
        await listening.shows_out(reason)
    assert await listening.pulls()
    assert listening.owner.refused == {reason: 1}


async def test_a_system_without_threads_to_spare_shows_one_out_and_keeps_the_door_open(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, failures = threading.Thread.start, iter([RuntimeError("can't start new thread")])

    def start_or_fail(thread: threading.Thread) -> None:
        if thread.name.endswith("-serve") and (failure := next(failures, None)) is not None:
            raise failure
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_fail)
    with listening.knock() as sock:
        await listening.shows_out("full")
        assert sock.recv(1) == b""
    assert await listening.pulls()
