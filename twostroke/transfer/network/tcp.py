"""The tcp transport: own sockets, straight from the owner's pool memory into the reader's.

After the handshake a reader sends requests, one at a time:

    reader -> owner  [seconds left, page ids (u32 each), generations (u64 each)]
    owner -> reader  status, pages of a batch, status, pages of a batch, ..., status

A status byte of 0 means that every page sent so far kept its generation while it was sent. It also means that the pages
of the next batch have their generations. A 1 ends the answer and a frame [reason] follows. Any other error is a closed
connection. The copy thread is the only writer of local pages, so a pull that has ended is fenced.

Pages of a device go through page-locked buffers on both sides. A batch is copied while the batch before it is sent, or
the batch after it is received.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence

import numpy as np

from twostroke.base.errors import PeerLost, TransferFailed
from twostroke.base.fault_points import Point, reach
from twostroke.kv_cache.layout import PoolLayout
from twostroke.kv_cache.memory import PageAccess, Pages
from twostroke.transfer.base import Identity, PageCopy, PageEndpoint
from twostroke.transfer.network.connection import MAX_PAGES, Connection
from twostroke.transfer.network.network_transport import NetworkTransport
from twostroke.transfer.network.requests import PageRequest, read_request
from twostroke.transfer.pulls import PullTally
from twostroke.transfer.sockets.frames import (
    Deadline,
    check_fields,
    receive,
    receive_frame,
    receive_into,
    send,
    send_frame,
)
from twostroke.transfer.sockets.tls import SocketWrapper

CONNECTIONS = 2
"""Connections per peer, opened when used, so that a short pull need not wait for a long one."""


class TcpTransport(NetworkTransport):
    name = "tcp"

    def serve(self, sock: socket.socket, memory: Pages) -> None:
        serve_pages(sock, memory)

    def connections(self, endpoint: PageEndpoint, identity: Identity, memory: Pages) -> Sequence[Connection]:
        return [TcpConnection(endpoint, identity, memory, self.wrapper) for _ in range(CONNECTIONS)]


REQUEST_LIMIT_BYTES = MAX_PAGES * 12 + 64
BATCH_BYTES = 512 << 10
"""Bytes of pages between two status bytes. Small pages share system calls, and what is being copied stays in the CPU's
cache: 6 GB/s over loopback, where 2 MiB gave 5."""
KEPT, CHANGED = b"\0", b"\1"

_KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
"""Options: the owner drops a reader whose machine has not answered for a minute (30 s, then 3 times 10 s)."""


def batch_pages(layout: PoolLayout) -> int:
    """Returns how many pages lie between two status bytes: for owner and reader alike."""
    return max(1, BATCH_BYTES // max(layout.page_sizes))


def serve_pages(sock: socket.socket, memory: Pages) -> None:
    """Serves requests until an exception: EOFError when the reader hangs up, InvalidRequest for garbage, ..."""
    keep_alive(sock)
    with contextlib.closing(memory.access(batch_pages(memory.layout))) as access:
        while True:
            fields = receive_frame(sock, REQUEST_LIMIT_BYTES, None)
            check_fields(fields, (float, bytes, bytes))
            seconds, page_ids, generations = fields
            _answer(sock, read_request(seconds, page_ids, generations, memory), memory, access)


def keep_alive(sock: socket.socket) -> None:
    """Lets the socket notice when the other machine is gone, and send small frames at once."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _answer(sock: socket.socket, request: PageRequest, memory: Pages, access: PageAccess) -> None:
    """Sends the pages; generations are checked before a batch is sent and after its last byte."""
    reach(Point.TRANSPORT_SERVING)
    step, count = batch_pages(memory.layout), len(request.pages)
    pages = request.pages.tolist()
    batches = access.read(pages[start : start + step] for start in range(0, count, step))
    sent_from = 0
    for start in [*range(0, count, step), count]:
        if start:
            reach(Point.TRANSPORT_SENT)
        views = next(batches, [])
        stop = min(start + step, count)
        if reason := request.changed(sent_from, stop, memory):
            send(sock, [CHANGED], request.deadline)
            send_frame(sock, [reason], request.deadline)
            return
        send(sock, [KEPT, *views], request.deadline)
        sent_from = start


REASON_LIMIT_BYTES = 4096


class TcpConnection(Connection):
    def __init__(self, endpoint: PageEndpoint, identity: Identity, memory: Pages, wrapper: SocketWrapper) -> None:
        super().__init__(endpoint, identity, wrapper)
        self._layout = memory.layout
        self._access = memory.access(batch_pages(memory.layout))

    def enter(self, sock: socket.socket, deadline: Deadline) -> None:
        """Sends nothing after the handshake."""

    def copy_part(
        self, sock: socket.socket, copies: tuple[PageCopy, ...], deadline: Deadline, tally: PullTally
    ) -> None:
        remote = np.array([copy.remote for copy in copies], "<u4").tobytes()
        generations = np.array([copy.generation for copy in copies], "<u8").tobytes()
        send_frame(sock, [deadline.remaining_s(), remote, generations], deadline)
        status = bytearray(receive(sock, 1, deadline))
        step = batch_pages(self._layout)
        for start in range(0, len(copies), step):
            _refuse_changed(sock, status, deadline)
            batch = copies[start : start + step]
            pages = [copy.local for copy in batch]
            views = self._access.landing(pages)
            receive_into(sock, [*views, memoryview(status)], deadline)
            self._access.landed()
            tally.copied_bytes += self._layout.bytes_of(pages)
        _refuse_changed(sock, status, deadline)

    def synchronize(self) -> None:
        self._access.synchronize()

    def leave(self) -> None:
        """Cleans up nothing: bytes came only through the socket."""

    def release(self) -> None:
        self._access.close()


def _refuse_changed(sock: socket.socket, status: bytearray, deadline: Deadline) -> None:
    if status == KEPT:
        return
    if status != CHANGED:
        raise PeerLost(f"answers with status {bytes(status)!r}")
    fields = receive_frame(sock, REASON_LIMIT_BYTES, deadline)
    check_fields(fields, (str,))
    raise TransferFailed(fields[0])
