"""Peers that cannot be reached leave nothing behind, whatever the reason."""

from __future__ import annotations

import os
import socket
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from tests.unit.transfer.makers import HostSharing, make_memory
from twostroke.base.errors import PeerLost, ServeError
from twostroke.base.ids import Epoch
from twostroke.device.memory import DeviceMemory
from twostroke.kv_cache.layout import PoolLayout
from twostroke.kv_cache.memory import PageMemory
from twostroke.transfer.base import Identity, PageCopy, PageEndpoint
from twostroke.transfer.peers import CopyThreadPeer, Peers
from twostroke.transfer.pulls import Pull
from twostroke.transfer.same_host.cuda_ipc import CudaIpcTransport
from twostroke.transfer.same_host.shm import ShmTransport
from twostroke.transfer.sockets.frames import Deadline
from twostroke.transfer.sockets.handshake import Welcome

OWNER, READER = (Identity(name, Epoch(1, 7), "fingerprint", "secret") for name in ("owner", "reader"))


class BrokenPeer(CopyThreadPeer):
    ended = False

    def start_handshake(self, deadline: Deadline) -> Future[Welcome]:
        handshake: Future[Welcome] = Future()
        handshake.set_exception(ZeroDivisionError("a bug"))
        return handshake

    def start(self, copies: tuple[PageCopy, ...], deadline: Deadline) -> Pull:
        raise NotImplementedError

    def end(self) -> None:
        self.ended = True


async def test_a_peer_whose_hello_fails_for_any_reason_is_closed() -> None:
    peer = BrokenPeer(PageEndpoint("tcp", "somewhere", "here", Epoch(1, 1), "fingerprint", PoolLayout.of(1, 1)))
    with pytest.raises(ZeroDivisionError):
        await Peers[BrokenPeer]().reach(peer, 1.0)
    assert peer.ended


class Forbidden(HostSharing):
    def open(self, handle: bytes, device: torch.device) -> torch.Tensor:
        raise RuntimeError("CUDA error: invalid device context")


async def test_a_gpu_whose_memory_cannot_be_opened_is_a_lost_peer() -> None:
    """The owner may be in a container of its own. A check after each test here shows that no thread is left."""
    owner, reader = CudaIpcTransport(HostSharing()), CudaIpcTransport(Forbidden())
    memories = [make_memory("staged", 2, 64) for _ in range(2)]
    endpoint = await owner.open(memories[0], OWNER)
    await reader.open(memories[1], READER)
    with pytest.raises(PeerLost, match="cannot be opened: CUDA error"):
        await reader.connect(endpoint, 5.0)
    for transport in (reader, owner):
        await transport.close()
    for memory in memories:
        assert isinstance(memory, DeviceMemory)
        memory.close()


class Misleading(ShmTransport):
    """Hands over a file of the right size that is not shared memory."""

    def __init__(self, file: int) -> None:
        super().__init__()
        self._file = file

    def hand_over(self, sock: socket.socket, memory: PageMemory) -> None:
        socket.send_fds(sock, [b"\0"], [self._file])


async def test_a_descriptor_that_is_no_page_memory_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "pages"
    memories = [PageMemory(2, 64) for _ in range(2)]
    path.write_bytes(bytes(memories[0].total_bytes))
    with path.open("rb") as file:
        owner, reader = Misleading(file.fileno()), ShmTransport()
        endpoint = await owner.open(memories[0], OWNER)
        await reader.open(memories[1], READER)
        for _ in range(3):
            with pytest.raises(ServeError):
                await reader.connect(endpoint, 5.0)
        for transport in (reader, owner):
            await transport.close()
        assert _descriptors_of(path) == 1, "ours alone"
    for memory in memories:
        memory.close()


def _descriptors_of(path: Path) -> int:
    folder = Path("/proc/self/fd")
    return sum(os.path.realpath(link) == str(path) for link in folder.iterdir())
