"""Page transports by name, and the choice between them for one pair of workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twostroke.base.errors import ConfigError, PeerLost
from twostroke.kv_cache.memory import PageMemory, Pages
from twostroke.transfer.base import PageEndpoint, PageTransport, host_id
from twostroke.transfer.network.tcp import TcpTransport
from twostroke.transfer.same_host.shm import ShmTransport
from twostroke.transfer.sockets.tls import PLAIN, SocketWrapper


def _open_cuda_ipc(_host: str, _stall_s: float, _wrapper: SocketWrapper, _port: int) -> PageTransport:
    from twostroke.transfer.same_host.cuda_ipc import CudaIpcTransport  # loads torch

    return CudaIpcTransport()


def _open_nixl(host: str, _stall_s: float, wrapper: SocketWrapper, _port: int) -> PageTransport:
    from twostroke.transfer.network.nixl import NixlTransport  # may not be installed

    return NixlTransport(host, wrapper)


ONE_HOST = frozenset({"cuda_ipc", "shm"})
"""Transports that work within one host only."""

_MAKERS: dict[str, Callable[[str, float, SocketWrapper, int], PageTransport]] = {
    "cuda_ipc": _open_cuda_ipc,
    "shm": lambda _host, _stall_s, _wrapper, _port: ShmTransport(),
    "nixl": _open_nixl,
    "tcp": TcpTransport,
}


HOST_NAMES = ("shm", "tcp")
"""Default transports of pages in host memory, best first."""


def default_names(memory: Pages) -> tuple[str, ...]:
    """Returns the default transports for the pages' memory, best first. nixl is not one: it needs a trusted network."""
    if isinstance(memory, PageMemory):
        return HOST_NAMES
    return ("tcp",) if memory.place is None else ("cuda_ipc", "tcp")


def check_names(names: Sequence[str]) -> None:
    """Checks that these are known transports, each named once. Raises ConfigError."""
    if not names or len(set(names)) != len(names) or not set(names) <= set(_MAKERS):
        known = ", ".join(_MAKERS)
        raise ConfigError(f"--transports must be some of {known}, each once; got {list(names)}", field="transports")


def open_transports(
    names: Sequence[str], host: str, stall_s: float, wrapper: SocketWrapper = PLAIN, port: int = 0
) -> list[PageTransport]:
    """Returns one transport per name, in this order of preference.

    Network transports bind to `host`, tcp to `port`. A pull without progress for `stall_s` fails, where that can be
    seen. `wrapper` adds TLS to connections that leave the host.
    """
    check_names(names)
    return [_MAKERS[name](host, stall_s, wrapper, port) for name in names]


def better_transports(
    chosen: PageTransport, endpoints: Sequence[PageEndpoint], transports: Sequence[PageTransport]
) -> list[str]:
    """Returns the transports before the chosen one that should reach the peer: between hosts, none of `ONE_HOST`."""
    is_here = any(endpoint.host_id == host_id() for endpoint in endpoints)
    better = [transport.name for transport in transports[: transports.index(chosen)]]
    return [name for name in better if is_here or name not in ONE_HOST]


def leading_to(
    endpoints: Sequence[PageEndpoint], transports: Sequence[PageTransport]
) -> list[tuple[PageTransport, PageEndpoint]]:
    """Returns our transports that reach the peer, best first, each with its endpoint: at least one.

    Raises ConfigError if there is no common transport, and PeerLost if the common ones do not reach the peer.
    """
    found = []
    for transport in transports:
        own = (each for each in endpoints if each.transport == transport.name and transport.reaches(each))
        if (endpoint := next(own, None)) is not None:
            found.append((transport, endpoint))
    if found:
        return found
    ours = [transport.name for transport in transports]
    theirs = [f"{endpoint.transport} at {endpoint.address} on {endpoint.host_id}" for endpoint in endpoints]
    message = f"no page transport leads to the peer: it offers {theirs or 'none'}, here are {ours or 'none'}"
    if set(ours) & {endpoint.transport for endpoint in endpoints}:
        raise PeerLost(message)
    raise ConfigError(message, field="transports")
