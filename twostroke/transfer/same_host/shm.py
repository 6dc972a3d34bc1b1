"""The shm transport: the owner hands over its read-only memfd, and a pull is a copy between two mappings."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import numpy as np

from twostroke.base.ids import PageId
from twostroke.kv_cache.memory import PageMemory
from twostroke.transfer.base import Identity, PageCopy, PageEndpoint
from twostroke.transfer.same_host.same_host_transport import (
    SameHostPeer,
    SameHostTransport,
    receive_descriptor,
    refuse_changed,
)
from twostroke.transfer.sockets.frames import Deadline


class ShmTransport(SameHostTransport["_ShmPeer", PageMemory]):
    name = "shm"

    def __init__(self) -> None:
        super().__init__(PageMemory)

    def hand_over(self, sock: socket.socket, memory: PageMemory) -> None:
        socket.send_fds(sock, [b"\0"], [memory.fd])

    def peer(self, endpoint: PageEndpoint, identity: Identity, memory: PageMemory) -> _ShmPeer:
        return _ShmPeer(endpoint, identity, memory)


class _ShmPeer(SameHostPeer):
    pages_per_copy = 1

    def __init__(self, endpoint: PageEndpoint, identity: Identity, memory: PageMemory) -> None:
        self._local = memory
        self._remote: PageMemory | None = None
        super().__init__(endpoint, identity)

    def receive_memory(self, sock: socket.socket, deadline: Deadline) -> None:
        descriptor = receive_descriptor(sock, self.endpoint)
        try:
            self._remote = PageMemory.attach(descriptor, self.endpoint.layout)
        except BaseException:
            os.close(descriptor)
            raise

    def copy(self, copies: Sequence[PageCopy]) -> None:
        assert self._remote is not None, "copied before the handshake"
        for copy in copies:
            page = PageId(copy.remote)
            refuse_changed(copy, self._remote.generation(page))
            np.copyto(self._local.page(copy.local), self._remote.page(page))
            refuse_changed(copy, self._remote.generation(page), after=True)

    def release(self) -> None:
        if self._remote is not None:
            self._remote.close()
        self._remote = None
