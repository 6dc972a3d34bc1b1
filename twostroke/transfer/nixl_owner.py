"""The owner's end of one NIXL page connection: write the pages that an admitted reader asks for into its own."""

from __future__ import annotations

import socket

import numpy as np

from twostroke.errors import InvalidRequest
from twostroke.kv_cache.memory import Pages, Place
from twostroke.transfer.connection import MAX_PAGES
from twostroke.transfer.frames import Deadline, check_fields, receive_frame, send_frame
from twostroke.transfer.hello import HELLO_S
from twostroke.transfer.nixl_agent import Agent, RemotePages
from twostroke.transfer.requests import read_pages, read_request
from twostroke.transfer.tcp_owner import keep_alive
from twostroke.transfer.threads import has_hung_up

_ENTRY_LIMIT_BYTES = 1 << 20
"""An agent's metadata is some hundred bytes, and more with many network devices."""
_REQUEST_LIMIT_BYTES = MAX_PAGES * 16 + 64
_MAX_READER_PAGES = 1 << 26


def serve_writes(sock: socket.socket, memory: Pages, agent: Agent) -> None:
    """Returns only by an exception: EOFError when the reader hangs up, InvalidRequest for garbage, ..."""
    keep_alive(sock)
    entry = receive_frame(sock, _ENTRY_LIMIT_BYTES, Deadline.after(HELLO_S))
    check_fields(entry, (bytes, int, int, int))
    metadata, address, gpu, pages = entry
    if not (0 <= address < 1 << 64 and -1 <= gpu < 1 << 16 and 0 < pages <= _MAX_READER_PAGES):
        raise InvalidRequest(f"a reader's {pages} pages at {address} on GPU {gpu} are none")
    remote = agent.add(metadata, Place(address, None if gpu < 0 else gpu), pages, memory.page_bytes)
    try:
        send_frame(sock, [], Deadline.after(HELLO_S))
        while True:
            _answer(sock, memory, agent, remote, pages)
    finally:
        agent.remove(remote)


def _answer(sock: socket.socket, memory: Pages, agent: Agent, remote: RemotePages, remote_pages: int) -> None:
    fields = receive_frame(sock, _REQUEST_LIMIT_BYTES, None)
    check_fields(fields, (float, bytes, bytes, bytes))
    seconds, page_ids, local_ids, generations = fields
    request = read_request(seconds, page_ids, generations, memory)
    targets = read_pages(local_ids, remote_pages)
    count = len(request.pages)
    if len(targets) != count:
        raise InvalidRequest(f"{count} pages were asked for, into {len(targets)}")
    reason = request.changed(0, count, memory)
    if not reason:
        agent.write(
            request.pages.astype(np.int32),
            remote,
            targets.astype(np.int32),
            request.deadline,
            lambda: not has_hung_up(sock),
        )
        reason = request.changed(0, count, memory)
    send_frame(sock, [reason], request.deadline)
