"""The process that has the clients' gRPC port. The router writes to its stdin, and the process ends when that ends.

`python -m router.grpc_listener.process LISTENING_DESCRIPTOR own|shared BACKEND MOST_CONNECTIONS [CERT KEY [CA]]`
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import sys

from router.grpc_listener.listener import SHARED, Context, GrpcListener


def main() -> None:
    descriptor, queue, backend, most, *files = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM):  # to the whole group: the router finishes, and then ends this
        signal.signal(number, signal.SIG_IGN)
    listening = socket.socket(fileno=int(descriptor))
    listening.setblocking(False)
    os.set_blocking(1, False)
    context, is_shared = _context(files) if files else None, queue == SHARED
    GrpcListener(listening, 0, backend, int(most), context, 1, is_shared=is_shared).run()
    with contextlib.suppress(FileNotFoundError):
        os.unlink(backend)  # if the router was killed


def _context(files: list[str]) -> Context:
    from twostroke.base.credentials import TlsConfig
    from twostroke.security.tls import Certificates, CertificateUse

    cert, key, *ca = files
    certificates = Certificates(TlsConfig(cert=cert, key=key, ca=ca[0] if ca else None), CertificateUse.CLIENTS)

    def current() -> ssl.SSLContext:
        context = certificates.server
        context.set_alpn_protocols(["h2"])
        return context

    return current


if __name__ == "__main__":
    main()
