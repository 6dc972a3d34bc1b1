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

SMALL_COPY_BYTES = 64 << 10
"""Pages that are as large or larger are copied one by one, smaller ones together up to this size."""


class ShmTransport(SameHostTransport["_ShmPeer", PageMemory]):
    name = "shm"

    def __init__(self) -> None:
        super().__init__(PageMemory)

    def hand_over(self, sock: socket.socket, memory: PageMemory) -> None:
        socket.send_fds(sock, [b"\0"], [memory.fd])

    def peer(self, endpoint: PageEndpoint, identity: Identity, memory: PageMemory) -> _ShmPeer:
        return _ShmPeer(endpoint, identity, memory)


class _ShmPeer(SameHostPeer):
    def __init__(self, endpoint: PageEndpoint, identity: Identity, memory: PageMemory) -> None:
        self._local = memory
        self.pages_per_copy = max(1, SMALL_COPY_BYTES // max(memory.layout.page_sizes))
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
        if len(copies) > 1 and len(self._local.regions) == 1:
            self._copy_rows(self._remote, copies)
            return
        for copy in copies:
            page = PageId(copy.remote)
            refuse_changed(copy, self._remote.generation(page))
            np.copyto(self._local.page(copy.local), self._remote.page(page))
            refuse_changed(copy, self._remote.generation(page), after=True)

    def _copy_rows(self, remote: PageMemory, copies: Sequence[PageCopy]) -> None:
        """Copies small pages of one region at once: Python's overhead per page takes longer than copying its bytes."""
        theirs, ours, wanted = (np.array(column, np.uint64) for column in zip(*copies, strict=True))
        for is_after in (False, True):
            generations = remote.generations[theirs]
            for index in np.flatnonzero(generations != wanted).tolist():
                refuse_changed(copies[index], generations.item(index), after=is_after)
            if not is_after:
                self._local.data[ours] = remote.data[theirs]

    def release(self) -> None:
        if self._remote is not None:
            self._remote.close()
        self._remote = None
