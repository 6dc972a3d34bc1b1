"""The connections of a gRPC server, and who makes room: those without an admitted client are closed first.

gRPC's own limit closes new connections, even those of admitted clients: a hundred strangers that say nothing would keep
everybody out. Its core owns the sockets and does not show them. So this module looks for them among the process's
descriptors. It ends one by `shutdown` through a duplicate, which the core takes as the other side's end. A call costs a
few entries in a table.

The core also keeps all header fields of a call, however many, until they end, and hands them to Python: 13 MB of them
hold the event loop for a second. So a connection without an admitted client may send only so much.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import os
import socket
import stat
import struct
import sys
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from urllib.parse import unquote

LOOK_S = 0.2
"""Seconds between two looks at the descriptors' numbers."""
LOOK_ANYWAY_S = 2.0
"""Seconds between two looks at the connections if the numbers stay the same: one may be another connection by now."""
SPARE = 1024
"""Connections beyond the limit that may come between two looks; gRPC closes what comes beyond those."""

STRANGERS_BYTES = 256 << 10
"""Bytes that a connection may have sent before a call over it is let in, where messages are read after that. Those
that have sent more, a large first message perhaps, have until the next look for the event loop to let them in."""
STRANGERS_BYTES_PER_S = 16 << 10
"""Bytes that a connection may send for every second of its life, besides those before its first admitted call: for
those that ask about health again and again."""

_TCP_INFO_BYTES_RECEIVED = struct.Struct("128xQ")
"""The position of the count in Linux' `struct tcp_info`."""
_FOLDER = "/dev/fd"
"""The folder of the process's own descriptors, on Linux and on macOS."""

Peer = tuple[str, int]
"""Address and port of the other side."""


@dataclass(frozen=True, slots=True)
class _Seen:
    descriptor: int
    peer: Peer
    since_s: float
    inode: int


class Connections:
    def __init__(self, most: int, strangers_bytes: int) -> None:
        """`most` connections; each may send `strangers_bytes` before a call over it is let in."""
        self.most = most
        self._strangers_bytes = strangers_bytes
        self._ports: frozenset[int] = frozenset()
        self._known: OrderedDict[str, int] = OrderedDict()
        """Open calls that were let in, by gRPC's name of the other side; the one that has called last comes last."""
        self._seen: dict[tuple[int, int], _Seen | None] = {}
        """Connections by descriptor and inode: a number that is used again is looked at again. None: no connection."""
        self._descriptors: list[str] = []
        """At the last look."""
        self._admitted: set[_Seen] = set()
        """Connections with an admitted client, however long ago."""
        self._admitted_peers: frozenset[Peer] = frozenset()
        self._strangers: set[_Seen] = set()
        """The other connections."""
        self._greedy: set[_Seen] = set()
        """Strangers that had sent too much at the last look."""

    @contextlib.contextmanager
    def calling(self, peer: str) -> Iterator[None]:
        """Counts an admitted call for the time of the block. `peer`: gRPC's name of the other side."""
        calls = self._known.get(peer, 0)
        self._known[peer] = calls + 1
        try:
            yield
        finally:
            self._known[peer] -= 1
            self._known.move_to_end(peer)
            if len(self._known) > self.most + SPARE:
                for idle in [peer for peer, calls in self._known.items() if not calls][: SPARE // 2]:
                    del self._known[idle]

    def is_known(self, peer: str) -> bool:
        return peer in self._known or _peer_of(peer) in self._admitted_peers

    async def keep(self, addresses: Iterable[str]) -> None:
        """Makes room where there are too many, until cancelled. `addresses`: where the server listens."""
        self._ports = frozenset(int(address.rpartition(":")[2]) for address in addresses)
        looked_at_s = 0.0
        while True:
            await asyncio.sleep(LOOK_S)
            with contextlib.suppress(OSError):  # no descriptor is left to look with: one will be, at another look
                descriptors, now_s = os.listdir(_FOLDER), time.monotonic()
                is_new = descriptors != self._descriptors or now_s >= looked_at_s + LOOK_ANYWAY_S
                if self._strangers or is_new or len(descriptors) > self.most:
                    self._descriptors, looked_at_s = descriptors, now_s
                    seen, greedy = await asyncio.to_thread(self._look)
                    doomed = [*self._greedy_again(seen, greedy), *self._too_many(seen)]
                    if doomed:
                        await asyncio.to_thread(_end, doomed)

    def _greedy_again(self, seen: list[_Seen], greedy: set[_Seen]) -> set[_Seen]:
        """Returns strangers that had sent too much at the last look already, and were not let in since."""
        known = {_peer_of(name) for name in self._known}
        self._admitted = {each for each in seen if each in self._admitted or each.peer in known}
        self._admitted_peers = frozenset(each.peer for each in self._admitted)
        self._strangers = {each for each in seen if each not in self._admitted}
        greedy, before = greedy & self._strangers, self._greedy
        self._greedy = greedy
        return greedy & before

    def _too_many(self, seen: list[_Seen]) -> list[_Seen]:
        """Returns the connections that make room: strangers', then those that have been idle for longest."""
        too_many = len(seen) - self.most
        if too_many <= 0:
            return []
        places = {_peer_of(name): index for index, name in enumerate(self._known, 1)}
        busy = {_peer_of(name) for name, calls in self._known.items() if calls}
        idle = [each for each in seen if each.peer not in busy]
        idle.sort(key=lambda each: (each in self._admitted, places.get(each.peer, 0), each.since_s, each.inode))
        return idle[:too_many]

    def _look(self) -> tuple[list[_Seen], set[_Seen]]:
        """Returns the connections that are there, and those of strangers that have sent too much.

        It runs on a thread of its own: of thousands of connections it takes some milliseconds.
        """
        now_s, seen = time.monotonic(), dict[tuple[int, int], _Seen | None]()
        for name in os.listdir(_FOLDER):
            descriptor = int(name)
            try:
                status = os.fstat(descriptor)
            except OSError:
                continue
            if stat.S_ISSOCK(status.st_mode):
                key = descriptor, status.st_ino
                seen[key] = self._seen[key] if key in self._seen else self._connection(*key, now_s)
        self._seen = seen
        found = [each for each in seen.values() if each is not None]
        return found, {each for each in found if each not in self._admitted and self._is_greedy(each, now_s)}

    def _is_greedy(self, stranger: _Seen, now_s: float) -> bool:
        allowed_bytes = self._strangers_bytes + STRANGERS_BYTES_PER_S * (now_s - stranger.since_s)
        return _received_bytes(stranger) > allowed_bytes

    def _connection(self, descriptor: int, inode: int, now_s: float) -> _Seen | None:
        own = _duplicate(descriptor)
        if own is None:
            return None
        with own, contextlib.suppress(OSError):  # it may listen, or be over
            if own.family in (socket.AF_INET, socket.AF_INET6) and own.getsockname()[1] in self._ports:
                host, port = own.getpeername()[:2]
                return _Seen(descriptor, (_plain(host), port), now_s, inode)
        return None


def _end(doomed: Iterable[_Seen]) -> None:
    """Ends connections. A number may mean another file by now; the inode tells."""
    for seen in doomed:
        own = _duplicate(seen.descriptor)
        if own is None:
            continue
        with own, contextlib.suppress(OSError):  # it may be over
            if os.fstat(own.fileno()).st_ino == seen.inode:
                own.shutdown(socket.SHUT_RDWR)


def _received_bytes(seen: _Seen) -> int:
    """Returns the received bytes. 0 where the system does not report them."""
    own = _duplicate(seen.descriptor) if sys.platform == "linux" else None
    if own is None:
        return 0
    with own, contextlib.suppress(OSError):  # it may be over
        info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        if len(info) >= _TCP_INFO_BYTES_RECEIVED.size:
            return int(_TCP_INFO_BYTES_RECEIVED.unpack_from(info)[0])
    return 0


def _duplicate(descriptor: int) -> socket.socket | None:
    try:
        copy = os.dup(descriptor)
    except OSError:
        return None
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None


@functools.lru_cache(8 * SPARE)
def _peer_of(name: str) -> Peer:
    """Returns the peer of gRPC's name: `ipv4:127.0.0.1:5`, `ipv6:%5B::1%5D:5`."""
    host, _, port = unquote(name).partition(":")[2].rpartition(":")
    return _plain(host.strip("[]")), int(port) if port.isdecimal() else 0


def _plain(host: str) -> str:
    """Returns one spelling of an address: that of IPv4 where it is mapped into IPv6."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
