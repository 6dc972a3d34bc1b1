"""The nixl transport (RDMA where hosts have it): the reader asks over TCP, the owner writes into the reader's pages.

After the handshake the reader names its pages, then sends requests, one at a time:

    reader -> owner  [its agent's metadata, address of its pages, its GPU or -1, its pages of each group (u32 each)]
    owner -> reader  []
    reader -> owner  [seconds left, page ids (u32 each), local page ids (u32 each), generations (u64 each)]
    owner -> reader  [reason]: empty where the pages are there and had their generation before and after

The owner writes and the reader does not read. With UCX over TCP an owner answers reads in software, and crashes when a
reader dies in the middle of one. A write that has begun cannot be cancelled. So every connection has an agent of its
own on the reader's side. To close that agent is the fence: no write arrives through it afterwards. NIXL's own
connections require no token. Only an admitted reader gets the metadata, but the network must be trusted.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Sequence
from typing import Any

import numpy as np

from twostroke.base.errors import InvalidRequest, PeerLost, TransferFailed
from twostroke.kv_cache.layout import PageRegion, PoolLayout
from twostroke.kv_cache.memory import Pages, PoolLocation
from twostroke.transfer.base import Identity, PageCopy, PageEndpoint
from twostroke.transfer.copy_threads import has_hung_up, off_loop
from twostroke.transfer.network.connection import MAX_PAGES, Connection
from twostroke.transfer.network.network_transport import NetworkTransport
from twostroke.transfer.network.nixl_agent import Agent, RemotePages, load_bindings, place_of
from twostroke.transfer.network.requests import read_pages, read_request
from twostroke.transfer.network.tcp import keep_alive
from twostroke.transfer.pulls import PullTally
from twostroke.transfer.sockets.frames import Deadline, check_fields, receive_frame, send_frame
from twostroke.transfer.sockets.handshake import HANDSHAKE_S, ReaderValidator
from twostroke.transfer.sockets.listener import Listener
from twostroke.transfer.sockets.tls import PLAIN, SocketWrapper

_REASON_LIMIT_BYTES = 4096


class NixlTransport(NetworkTransport):
    """Moves pages with NIXL. Raises ConfigError where it is not installed."""

    name = "nixl"

    def __init__(self, host: str, wrapper: SocketWrapper = PLAIN) -> None:
        """`wrapper` adds TLS to handshakes and requests. Pages use NIXL's own connections, without TLS."""
        load_bindings()
        super().__init__(host, wrapper=wrapper)  # no stall_s: pages do not come through the socket
        self._agent: Agent | None = None

    async def listen(self, validator: ReaderValidator, memory: Pages) -> tuple[str, Listener]:
        self._agent = await off_loop(functools.partial(Agent, "owner", memory))
        return await super().listen(validator, memory)

    def serve(self, sock: socket.socket, memory: Pages) -> None:
        assert self._agent is not None, "served before open"
        serve_writes(sock, memory, self._agent)

    def connections(self, endpoint: PageEndpoint, identity: Identity, memory: Pages) -> Sequence[Connection]:
        return [NixlConnection(endpoint, identity, memory, self.wrapper)]

    async def close(self) -> None:
        await super().close()
        if self._agent is not None:
            await off_loop(self._agent.close)
            self._agent = None


class NixlConnection(Connection):
    """The reader's end: a socket, and an agent that lasts as long as it."""

    def __init__(self, endpoint: PageEndpoint, identity: Identity, memory: Pages, wrapper: SocketWrapper) -> None:
        super().__init__(endpoint, identity, wrapper)
        self._memory = memory
        self._agent: Agent | None = None

    def enter(self, sock: socket.socket, deadline: Deadline) -> None:
        memory = self._memory
        self._agent = Agent("reader", memory)
        place = place_of(memory)
        gpu = -1 if place.gpu is None else place.gpu
        pages = np.array([region.pages for region in memory.layout.regions], "<u4").tobytes()
        send_frame(sock, [self._agent.metadata, place.address, gpu, pages], deadline)
        if receive_frame(sock, _REASON_LIMIT_BYTES, deadline):
            raise PeerLost("the owner answered to the agent's metadata with something else")

    def copy_part(
        self, sock: socket.socket, copies: tuple[PageCopy, ...], deadline: Deadline, tally: PullTally
    ) -> None:
        remote = np.array([copy.remote for copy in copies], "<u4").tobytes()
        local = np.array([copy.local for copy in copies], "<u4").tobytes()
        generations = np.array([copy.generation for copy in copies], "<u8").tobytes()
        send_frame(sock, [deadline.remaining_s(), remote, local, generations], deadline)
        fields: list[Any] = receive_frame(sock, _REASON_LIMIT_BYTES, deadline)
        check_fields(fields, (str,))
        if fields[0]:
            raise TransferFailed(fields[0])
        tally.copied_bytes += self._memory.layout.bytes_of([copy.local for copy in copies])

    def synchronize(self) -> None:
        """Waits for nothing: the owner answers after its last write, and otherwise `leave` closes the agent."""

    def leave(self) -> None:
        if self._agent is not None:
            self._agent.close()
        self._agent = None

    def release(self) -> None:
        """Releases nothing: `leave` has closed the agent."""


_ENTRY_LIMIT_BYTES = 1 << 20
"""Largest metadata of an agent: some hundred bytes, and more with many network devices."""
_REQUEST_LIMIT_BYTES = MAX_PAGES * 16 + 64
_MAX_READER_PAGES = 1 << 26


def serve_writes(sock: socket.socket, memory: Pages, agent: Agent) -> None:
    """Serves requests until an exception: EOFError when the reader hangs up, InvalidRequest for garbage, ..."""
    keep_alive(sock)
    entry = receive_frame(sock, _ENTRY_LIMIT_BYTES, Deadline.after(HANDSHAKE_S))
    check_fields(entry, (bytes, int, int, bytes))
    metadata, address, gpu, counts = entry
    sizes = memory.layout.page_sizes
    pages = np.frombuffer(counts, "<u4").tolist() if len(counts) == 4 * len(sizes) else []
    if not (0 <= address < 1 << 64 and -1 <= gpu < 1 << 16 and 0 < sum(pages) <= _MAX_READER_PAGES):
        raise InvalidRequest(f"a reader's {pages} pages at {address} on GPU {gpu} are none")
    layout = PoolLayout(tuple(map(PageRegion, pages, sizes)))
    remote = agent.add(metadata, PoolLocation(address, None if gpu < 0 else gpu), layout)
    try:
        send_frame(sock, [], Deadline.after(HANDSHAKE_S))
        while True:
            _answer(sock, memory, agent, remote, layout)
    finally:
        agent.remove(remote)


def _answer(sock: socket.socket, memory: Pages, agent: Agent, remote: RemotePages, theirs: PoolLayout) -> None:
    fields = receive_frame(sock, _REQUEST_LIMIT_BYTES, None)
    check_fields(fields, (float, bytes, bytes, bytes))
    seconds, page_ids, local_ids, generations = fields
    request = read_request(seconds, page_ids, generations, memory)
    targets = read_pages(local_ids, theirs.pages)
    count = len(request.pages)
    if len(targets) != count:
        raise InvalidRequest(f"{count} pages were asked for, into {len(targets)}")
    if [*map(memory.layout.region_of, request.pages)] != [*map(theirs.region_of, targets)]:
        raise InvalidRequest("pages were asked for into pages of another group")
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
