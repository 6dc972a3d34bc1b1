"""How clients of a server connect over HTTP."""

from __future__ import annotations

import sys

import aiohttp

from cluster.flags.client_tls import ClientTls


def connector(tls: ClientTls | None) -> aiohttp.TCPConnector:
    """A connection per request: some servers close one after an answer just as the next request goes out on it.

    Where a server does not say goodbye over TLS, the connection ends with the session: aiohttp would forget it, and it
    would outlive its event loop. Raises ConfigError.
    """
    return aiohttp.TCPConnector(
        limit=0,
        force_close=True,
        ssl=True if tls is None else tls.context(),
        enable_cleanup_closed=sys.version_info < (3, 12, 7),  # from there on aiohttp takes it for needless
    )
