"""Unix sockets of page transports: where they lie, who may be at the other end, and what a thief of one is shown."""

from __future__ import annotations

import errno
import os
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest

from twostroke.base.errors import PeerLost, Unauthenticated
from twostroke.base.ids import Epoch
from twostroke.kv_cache.layout import PoolLayout
from twostroke.kv_cache.memory import PageMemory
from twostroke.security.trusted_paths import UntrustedPath, private_folder
from twostroke.transfer import base
from twostroke.transfer.base import SOCKETS, Identity, PageEndpoint, host_id
from twostroke.transfer.network.tcp import TcpTransport
from twostroke.transfer.same_host import same_host_transport
from twostroke.transfer.same_host.same_host_transport import check_same_user, listen_in
from twostroke.transfer.same_host.shm import ShmTransport
from twostroke.transfer.sockets.handshake import PROTOCOL

TOKEN = "the cluster's secret token"
READER = Identity("reader", Epoch(1, 8), "f", TOKEN)
LAYOUT = PoolLayout.of(2, 64)


def test_sockets_lie_in_a_folder_that_this_user_alone_may_enter() -> None:
    status = private_folder(SOCKETS).lstat()
    assert (stat.S_IMODE(status.st_mode), status.st_uid) == (0o700, os.geteuid())


def test_the_other_end_of_a_socket_must_be_a_process_of_this_user(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        check_same_user(ours)
        if os.geteuid() == 0:  # whoever runs as root is believed by everybody
            monkeypatch.setattr(same_host_transport, "_CREDENTIALS", Credentials())
        else:
            monkeypatch.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(Unauthenticated, match="belongs to user"):
            check_same_user(ours)


class Credentials:
    """Stands in for what the kernel says of a process of user 4711."""

    size = 12

    def unpack(self, said: bytes) -> tuple[int, int, int]:
        return 1, 4711, 1


async def test_a_process_of_another_user_is_neither_greeted_nor_read_from(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, transport = PageMemory(2, 64), ShmTransport()
    endpoint = await transport.open(memory, Identity("owner", Epoch(1, 7), "f", TOKEN))
    monkeypatch.setattr(same_host_transport, "_CREDENTIALS", Credentials())
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(str(private_folder(SOCKETS) / endpoint.address))
        assert sock.recv(100) == b""
    assert set(transport.refused) == {"unauthenticated"}, "whoever opens a transport meanwhile tries all sockets"
    reader = ShmTransport()
    reader.read_into(memory, READER)
    with pytest.raises(Unauthenticated, match="belongs to user 4711"):
        await reader.connect(endpoint, 10.0)
    await reader.close()
    await transport.close()
    memory.close()


async def test_a_listener_that_is_not_the_owner_learns_no_token_and_is_not_read_from() -> None:
    path, listening = listen_in(private_folder(SOCKETS), 8)
    shown = bytearray()

    def steal() -> None:
        sock, _ = listening.accept()
        with sock:
            for said in ([PROTOCOL, bytes(16)], ["welcome", bytes(32), "owner", "1.7", "f", 2, 64]):
                body = msgpack.packb(said)
                sock.sendall(len(body).to_bytes(4, "big") + body)
                shown.extend(sock.recv(4096))

    thief = threading.Thread(target=steal)
    thief.start()
    memory, reader = PageMemory(2, 64), ShmTransport()
    reader.read_into(memory, READER)
    endpoint = PageEndpoint("shm", path.name, host_id(), Epoch(1, 7), "f", LAYOUT)
    with pytest.raises(PeerLost, match="did not prove that it has this cluster's token"):
        await reader.connect(endpoint, 10.0)
    await reader.close()
    thief.join()
    listening.close()
    path.unlink()
    memory.close()
    assert b"reader" in shown
    assert TOKEN.encode() not in shown


def test_workers_that_see_other_folders_of_sockets_reach_each_other_over_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(name: str) -> Path:
        raise UntrustedPath(errno.EPERM, f"the folder of {name} is somebody else's")

    ours = host_id()
    monkeypatch.setattr(base, "private_folder", refused)
    theirs = host_id.__wrapped__()
    by_tcp, by_shm = (PageEndpoint(name, "127.0.0.1:5", theirs, Epoch(1, 7), "f", LAYOUT) for name in ("tcp", "shm"))
    assert theirs != ours
    assert TcpTransport("127.0.0.1", 1.0).reaches(by_tcp)
    assert not ShmTransport().reaches(by_shm)
    assert not TcpTransport("127.0.0.1", 1.0).reaches(replace(by_tcp, host_id=f"another-{theirs}"))


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """The name of a socket has at most 107 bytes, and pytest's folders take most of them."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_sockets_of_ended_processes_are_removed_and_those_of_others_stay(short_folder: Path) -> None:
    (dead, gone), (alive, listening) = listen_in(short_folder, 8), listen_in(short_folder, 8)
    gone.close()
    beginning = socket.socket(socket.AF_UNIX)
    beginning.bind(str(short_folder / ".beginning"))
    with listening, beginning:
        new, other = listen_in(short_folder, 8)
        other.close()
        assert set(short_folder.iterdir()) == {alive, new, short_folder / ".beginning"}
        assert dead not in short_folder.iterdir()


async def test_a_socket_goes_with_its_transport() -> None:
    memory, transport = PageMemory(2, 64), ShmTransport()
    endpoint = await transport.open(memory, READER)
    path = private_folder(SOCKETS) / endpoint.address
    assert path.is_socket()
    await transport.close()
    memory.close()
    assert not path.exists()
