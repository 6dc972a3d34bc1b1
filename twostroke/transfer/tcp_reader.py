"""The reader's end of one TCP page connection: pages go from the socket into the pool."""

from __future__ import annotations

import socket

import numpy as np

from twostroke.errors import PeerLost, TransferFailed
from twostroke.kv_cache.memory import Pages
from twostroke.transfer.base import Endpoint, Identity, PageCopy
from twostroke.transfer.connection import Connection
from twostroke.transfer.frames import Deadline, check_fields, receive, receive_frame, receive_into, send_frame
from twostroke.transfer.pulls import Tally
from twostroke.transfer.seal import Seal
from twostroke.transfer.tcp_owner import CHANGED, KEPT, batch_pages

REASON_LIMIT_BYTES = 4096


class TcpConnection(Connection):
    def __init__(self, endpoint: Endpoint, identity: Identity, memory: Pages, seal: Seal) -> None:
        super().__init__(endpoint, identity, seal)
        self._size = memory.page_bytes
        self._window = memory.window(batch_pages(memory.page_bytes))

    def enter(self, sock: socket.socket, deadline: Deadline) -> None:
        """All is said."""

    def copy_part(self, sock: socket.socket, copies: tuple[PageCopy, ...], deadline: Deadline, tally: Tally) -> None:
        pages = np.array([copy.remote for copy in copies], "<u4").tobytes()
        generations = np.array([copy.generation for copy in copies], "<u8").tobytes()
        send_frame(sock, [deadline.remaining_s(), pages, generations], deadline)
        status = bytearray(receive(sock, 1, deadline))
        step = batch_pages(self._size)
        for start in range(0, len(copies), step):
            _refuse_changed(sock, status, deadline)
            batch = copies[start : start + step]
            views = self._window.landing([copy.local for copy in batch])
            receive_into(sock, [*views, memoryview(status)], deadline)
            self._window.landed()
            tally.copied_bytes += len(batch) * self._size
        _refuse_changed(sock, status, deadline)

    def settle(self) -> None:
        self._window.settle()

    def leave(self) -> None:
        """Bytes came through the socket only."""

    def release(self) -> None:
        self._window.close()


def _refuse_changed(sock: socket.socket, status: bytearray, deadline: Deadline) -> None:
    if status == KEPT:
        return
    if status != CHANGED:
        raise PeerLost(f"answers with status {bytes(status)!r}")
    fields = receive_frame(sock, REASON_LIMIT_BYTES, deadline)
    check_fields(fields, (str,))
    raise TransferFailed(fields[0])
