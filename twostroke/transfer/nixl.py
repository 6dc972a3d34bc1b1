"""Pages over NIXL (RDMA where there is any): the reader asks over a TCP connection, the owner writes into its pages.

After the hello (`hello.py`) the reader says what may be written to, then sends requests, one at a time:

    reader -> owner  [its agent's metadata, address of its pages, its GPU or -1, its pages]
    owner -> reader  []
    reader -> owner  [seconds left, page ids (u32 each), local page ids (u32 each), generations (u64 each)]
    owner -> reader  [reason]: empty where the pages are there and had their generation before and after

The owner writes and the reader does not read, because an owner that answers reads in software (UCX over TCP) crashes
when a reader dies in the middle of one. A write that has begun cannot be called back; so every connection has an
agent of its own on the reader's side, and closing that agent is the fence: nobody can write through it afterwards.
NIXL's own connections ask for no token: only whoever was admitted learns the metadata, but the network must be trusted.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Sequence
from typing import Any

import numpy as np

from twostroke.errors import PeerLost, TransferFailed
from twostroke.kv_cache.memory import Pages
from twostroke.transfer.base import Endpoint, Identity, PageCopy
from twostroke.transfer.connection import Connection
from twostroke.transfer.frames import Deadline, check_fields, receive_frame, send_frame
from twostroke.transfer.hello import Gate
from twostroke.transfer.listener import Listener
from twostroke.transfer.network import NetworkTransport
from twostroke.transfer.nixl_agent import Agent, load_bindings
from twostroke.transfer.nixl_owner import serve_writes
from twostroke.transfer.pulls import Tally
from twostroke.transfer.seal import PLAIN, Seal
from twostroke.transfer.threads import off_loop

_REASON_LIMIT_BYTES = 4096


class NixlTransport(NetworkTransport):
    """Raises ConfigError where NIXL is not installed."""

    name = "nixl"

    def __init__(self, host: str, seal: Seal = PLAIN) -> None:
        """`seal`: of hellos and requests. Pages take connections of NIXL's own, which cannot be sealed."""
        load_bindings()
        super().__init__(host, seal=seal)  # pages do not come through the socket: its silence says nothing
        self._agent: Agent | None = None

    async def listen(self, gate: Gate, memory: Pages) -> tuple[str, Listener]:
        self._agent = await off_loop(functools.partial(Agent, "owner", memory))
        return await super().listen(gate, memory)

    def serve(self, sock: socket.socket, memory: Pages) -> None:
        assert self._agent is not None, "served before open"
        serve_writes(sock, memory, self._agent)

    def connections(self, endpoint: Endpoint, identity: Identity, memory: Pages) -> Sequence[Connection]:
        return [NixlConnection(endpoint, identity, memory, self.seal)]

    async def close(self) -> None:
        await super().close()
        if self._agent is not None:
            await off_loop(self._agent.close)
            self._agent = None


class NixlConnection(Connection):
    """The reader's end: a socket, and an agent that lasts as long as it."""

    def __init__(self, endpoint: Endpoint, identity: Identity, memory: Pages, seal: Seal) -> None:
        super().__init__(endpoint, identity, seal)
        self._memory = memory
        self._agent: Agent | None = None

    def enter(self, sock: socket.socket, deadline: Deadline) -> None:
        memory = self._memory
        self._agent = Agent("reader", memory)
        place = memory.place
        gpu = -1 if place.gpu is None else place.gpu
        send_frame(sock, [self._agent.metadata, place.address, gpu, memory.pages], deadline)
        if receive_frame(sock, _REASON_LIMIT_BYTES, deadline):
            raise PeerLost("the owner answered to the agent's metadata with something else")

    def copy_part(self, sock: socket.socket, copies: tuple[PageCopy, ...], deadline: Deadline, tally: Tally) -> None:
        remote = np.array([copy.remote for copy in copies], "<u4").tobytes()
        local = np.array([copy.local for copy in copies], "<u4").tobytes()
        generations = np.array([copy.generation for copy in copies], "<u8").tobytes()
        send_frame(sock, [deadline.remaining_s(), remote, local, generations], deadline)
        fields: list[Any] = receive_frame(sock, _REASON_LIMIT_BYTES, deadline)
        check_fields(fields, (str,))
        if fields[0]:
            raise TransferFailed(fields[0])
        tally.copied_bytes += len(copies) * self._memory.page_bytes

    def settle(self) -> None:
        """The owner answers when it writes no more; without its answer, `leave` has closed the agent."""

    def leave(self) -> None:
        if self._agent is not None:
            self._agent.close()
        self._agent = None

    def release(self) -> None:
        """The agent is closed."""
