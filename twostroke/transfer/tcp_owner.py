"""The owner's end of one TCP page connection: answers an admitted reader's requests from pool memory."""

from __future__ import annotations

import contextlib
import socket

from twostroke.fault_points import Point, reach
from twostroke.kv_cache.memory import Pages, Window
from twostroke.transfer.connection import MAX_PAGES
from twostroke.transfer.frames import check_fields, receive_frame, send, send_frame
from twostroke.transfer.requests import PageRequest, read_request

REQUEST_LIMIT_BYTES = MAX_PAGES * 12 + 64
BATCH_BYTES = 512 << 10
"""Pages between two status bytes: small pages share system calls, and what is being copied stays in the CPU's cache
(6 GB/s over loopback where 2 MiB gave 5)."""
KEPT, CHANGED = b"\0", b"\1"

_KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
"""A reader whose machine has vanished is forgotten after a minute."""


def batch_pages(page_bytes: int) -> int:
    return max(1, BATCH_BYTES // page_bytes)


def serve_pages(sock: socket.socket, memory: Pages) -> None:
    """Returns only by an exception: EOFError when the reader hangs up, InvalidRequest for garbage, ..."""
    keep_alive(sock)
    with contextlib.closing(memory.window(batch_pages(memory.page_bytes))) as window:
        while True:
            fields = receive_frame(sock, REQUEST_LIMIT_BYTES, None)
            check_fields(fields, (float, bytes, bytes))
            seconds, page_ids, generations = fields
            _answer(sock, read_request(seconds, page_ids, generations, memory), memory, window)


def keep_alive(sock: socket.socket) -> None:
    """Notice when the other machine has vanished, and send small frames at once."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _answer(sock: socket.socket, request: PageRequest, memory: Pages, window: Window) -> None:
    """Send the pages; generations are looked at before a batch is sent and after its last byte was."""
    reach(Point.TRANSPORT_SERVING)
    step, count = batch_pages(memory.page_bytes), len(request.pages)
    pages = request.pages.tolist()
    batches = window.read(pages[start : start + step] for start in range(0, count, step))
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
