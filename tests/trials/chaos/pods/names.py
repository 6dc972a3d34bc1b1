"""Names of Services, as a cluster's DNS tells them: an address for each pod behind, nothing of IPv6, no other name."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Sequence

A_RECORD, TTL_S = 1, 1
NO_SUCH_NAME = 3
DOMAIN = "pods.svc.cluster.local"


class Names:
    """Answers until the process ends. `lookup` gives addresses of a Service's name, None where there is none."""

    def __init__(self, address: str, lookup: Callable[[str], Sequence[str] | None]) -> None:
        self._lookup = lookup
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((address, 53))
        threading.Thread(target=self._serve, name="names", daemon=True).start()

    def _serve(self) -> None:
        while True:
            query, sender = self._socket.recvfrom(4096)
            self._socket.sendto(self._answer(query), sender)

    def _answer(self, query: bytes) -> bytes:
        end = query.index(b"\0", 12)
        kind = struct.unpack(">H", query[end + 1 : end + 3])[0]
        found = self._lookup(_name(query[12:end]))
        addresses = found if found is not None and kind == A_RECORD else ()
        flags = 0x8580 | (NO_SUCH_NAME if found is None else 0)
        head = query[:2] + struct.pack(">HHHHH", flags, 1, len(addresses), 0, 0)
        records = (struct.pack(">HHHIH", 0xC00C, A_RECORD, 1, TTL_S, 4) + socket.inet_aton(each) for each in addresses)
        return head + query[12 : end + 5] + b"".join(records)


def _name(labels: bytes) -> str:
    parts = []
    while labels:
        size = labels[0]
        parts.append(labels[1 : 1 + size].decode())
        labels = labels[1 + size :]
    return ".".join(parts).removesuffix(f".{DOMAIN}")
