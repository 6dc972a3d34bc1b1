"""How clients connect to a server over HTTP and gRPC, with and without TLS."""

from __future__ import annotations

import sys

import aiohttp
import grpc

from cluster.flags.client_credentials import ClientTls
from twostroke.rpc.channel import TlsEndpoint


def connector(tls: ClientTls | None) -> aiohttp.TCPConnector:
    """Returns a connector that opens a connection per request. Raises ConfigError.

    Some servers close a connection just as the next request goes out on it. A TLS connection that the server does not
    close ends with the session, because aiohttp would let it outlive its event loop.
    """
    return aiohttp.TCPConnector(
        limit=0,
        force_close=True,
        ssl=True if tls is None else tls.context(),
        enable_cleanup_closed=sys.version_info < (3, 12, 7),  # newer versions do not need it
    )


def tls_endpoint(tls: ClientTls) -> TlsEndpoint:
    """Returns the channel credentials of a client. Raises ConfigError."""
    options = () if tls.name is None else (("grpc.ssl_target_name_override", tls.name),)
    return TlsEndpoint(grpc.ssl_channel_credentials(*tls.pem()), options)
