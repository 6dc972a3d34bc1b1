"""What page connections are sealed with: nothing, or mutual TLS between processes of the cluster.

Sealed pages go from the cipher into the pool's memory without another stop. A record of TLS holds 16 KiB, and Python
reads and writes one at a time: that costs calls beside the cipher (docs/security.md says how much).
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterable
from typing import Any, Protocol

from twostroke.credentials import CLUSTER_NAME, TlsConfig
from twostroke.tls import Certificates, Use
from twostroke.transfer.frames import Deadline

RECORD_BYTES = 16 << 10


class Seal(Protocol):
    def accepted(self, sock: socket.socket) -> socket.socket:
        """What to use instead of a socket that was accepted. No byte moves."""

    def dialled(self, sock: socket.socket) -> socket.socket:
        """What to use instead of a socket that is connected. No byte moves."""

    def shake_hands(self, sock: socket.socket, deadline: Deadline) -> None:
        """Before anything is said. Raises OSError, also for one who is not of the cluster."""


class Plain:
    def accepted(self, sock: socket.socket) -> socket.socket:
        return sock

    def dialled(self, sock: socket.socket) -> socket.socket:
        return sock

    def shake_hands(self, sock: socket.socket, deadline: Deadline) -> None:
        """There is nothing to agree on."""


class Sealed:
    def __init__(self, certificates: Certificates) -> None:
        self._certificates = certificates

    def accepted(self, sock: socket.socket) -> socket.socket:
        return self._certificates.server.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def dialled(self, sock: socket.socket) -> socket.socket:
        return self._certificates.client.wrap_socket(sock, server_hostname=CLUSTER_NAME, do_handshake_on_connect=False)

    def shake_hands(self, sock: socket.socket, deadline: Deadline) -> None:
        assert isinstance(sock, SealedSocket)
        sock.settimeout(deadline.wait_s())
        sock.do_handshake()
        # OpenSSL has looked for the name in servers' certificates; the CA may have issued for other clients as well.
        if sock.server_side and ("DNS", CLUSTER_NAME) not in (sock.getpeercert() or {}).get("subjectAltName", ()):
            raise ssl.SSLError(f"the reader's certificate does not name {CLUSTER_NAME}")


class SealedSocket(ssl.SSLSocket):
    """Sends and receives as `frames` does over any socket: several buffers at once, as far as TLS goes with that."""

    def sendmsg(self, buffers: Iterable[Any]) -> int:  # type: ignore[override]  # the one above refuses
        """One record: the first buffers together, or the beginning of the first."""
        return self.send(_record([memoryview(buffer).cast("B") for buffer in buffers]))

    def recvmsg_into(self, buffers: Iterable[Any]) -> tuple[int, list[Any], int, Any]:  # type: ignore[override]  # too
        """Into the first buffer, and into those behind it what has been decrypted already."""
        received = 0
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            if received and not self.pending():
                break
            moved = self.recv_into(view)
            received += moved
            if moved < len(view):
                break
        return received, [], 0, None


def _record(views: list[memoryview]) -> memoryview | bytes:
    if len(views[0]) >= RECORD_BYTES or len(views) == 1:
        return views[0]
    parts, room = [], RECORD_BYTES
    for view in views:
        parts.append(view[:room])
        room -= len(parts[-1])
        if not room:
            break
    return b"".join(parts)


PLAIN = Plain()


def seal_with(tls: TlsConfig | None) -> Seal:
    """Raises ConfigError where the certificates cannot be used."""
    return PLAIN if tls is None else Sealed(Certificates(tls, Use.CLUSTER, SealedSocket))
