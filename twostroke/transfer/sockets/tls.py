"""Page connections are plain, or use mutual TLS between processes of the cluster.

With TLS, bytes are decrypted straight into the pool's memory. A TLS record holds 16 KiB, and Python reads and writes
one at a time. That costs calls in addition to the cipher (docs/security.md says how much).
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterable
from typing import Any, Protocol

from twostroke.base.credentials import CLUSTER_NAME, TlsConfig
from twostroke.security.tls import Certificates, CertificateUse
from twostroke.transfer.sockets.frames import Deadline

RECORD_BYTES = 16 << 10


class SocketWrapper(Protocol):
    def accepted(self, sock: socket.socket) -> socket.socket:
        """Returns the socket to use for one that was accepted. No byte moves."""

    def dialled(self, sock: socket.socket) -> socket.socket:
        """Returns the socket to use for one that is connected. No byte moves."""

    def shake_hands(self, sock: socket.socket, deadline: Deadline) -> None:
        """Runs the TLS handshake. Raises OSError, also for a peer outside the cluster."""


class PlainWrapper:
    def accepted(self, sock: socket.socket) -> socket.socket:
        return sock

    def dialled(self, sock: socket.socket) -> socket.socket:
        return sock

    def shake_hands(self, sock: socket.socket, deadline: Deadline) -> None:
        """Does nothing: plain sockets have no handshake."""


class TlsWrapper:
    def __init__(self, certificates: Certificates) -> None:
        self._certificates = certificates

    def accepted(self, sock: socket.socket) -> socket.socket:
        return self._certificates.server.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def dialled(self, sock: socket.socket) -> socket.socket:
        return self._certificates.client.wrap_socket(sock, server_hostname=CLUSTER_NAME, do_handshake_on_connect=False)

    def shake_hands(self, sock: socket.socket, deadline: Deadline) -> None:
        assert isinstance(sock, TlsSocket)
        sock.settimeout(deadline.wait_s())
        sock.do_handshake()
        # OpenSSL has looked for the name in servers' certificates; the CA may have issued for other clients as well.
        if sock.server_side and ("DNS", CLUSTER_NAME) not in (sock.getpeercert() or {}).get("subjectAltName", ()):
            raise ssl.SSLError(f"the reader's certificate does not name {CLUSTER_NAME}")


class TlsSocket(ssl.SSLSocket):
    """Sends and receives as `frames` does over any socket: several buffers at once, as far as TLS allows it."""

    def sendmsg(self, buffers: Iterable[Any]) -> int:  # type: ignore[override]  # the one above refuses
        """Sends one record: the first buffers together, or the beginning of the first."""
        return self.send(_record([memoryview(buffer).cast("B") for buffer in buffers]))

    def recvmsg_into(self, buffers: Iterable[Any]) -> tuple[int, list[Any], int, Any]:  # type: ignore[override]  # too
        """Fills the first buffer, and the next ones with bytes that are decrypted already."""
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


PLAIN = PlainWrapper()


def wrapper_for(tls: TlsConfig | None) -> SocketWrapper:
    """Returns the wrapper for these settings. Raises ConfigError if the certificates cannot be used."""
    return PLAIN if tls is None else TlsWrapper(Certificates(tls, CertificateUse.CLUSTER, TlsSocket))
