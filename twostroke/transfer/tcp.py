"""Pages over TCP: own sockets, straight from the owner's pool memory into the reader's.

After the hello (`hello.py`) a reader sends requests, one at a time:

    reader -> owner  [seconds left, page ids (u32 each), generations (u64 each)]
    owner -> reader  status, pages of a batch, status, pages of a batch, ..., status

A status byte of 0 says: every page sent so far kept its generation while it was sent, and those that follow have
theirs. A 1 ends the answer and a frame [reason] follows. Any other error is a closed connection. The thread that
copies is the only one that writes into local pages, so a pull that has ended is fenced.

Pages of a device go through pinned buffers on both sides: the copy of a batch is under way while the batch before it
is sent, or the one after it received.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from twostroke.kv_cache.memory import Pages
from twostroke.transfer.base import Endpoint, Identity
from twostroke.transfer.connection import Connection
from twostroke.transfer.network import NetworkTransport
from twostroke.transfer.tcp_owner import serve_pages
from twostroke.transfer.tcp_reader import TcpConnection

CONNECTIONS = 2
"""Per peer, opened when used: a short pull need not wait for a long one."""


class TcpTransport(NetworkTransport):
    name = "tcp"

    def serve(self, sock: socket.socket, memory: Pages) -> None:
        serve_pages(sock, memory)

    def connections(self, endpoint: Endpoint, identity: Identity, memory: Pages) -> Sequence[Connection]:
        return [TcpConnection(endpoint, identity, memory, self.seal) for _ in range(CONNECTIONS)]
