"""Page transports by name, and the choice between them for one pair of workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twostroke.errors import ConfigError, PeerLost
from twostroke.kv_cache.memory import PageMemory, Pages
from twostroke.transfer.base import Endpoint, PageTransport
from twostroke.transfer.host import host_id
from twostroke.transfer.seal import PLAIN, Seal
from twostroke.transfer.shm import ShmTransport
from twostroke.transfer.tcp import TcpTransport


def _open_cuda_ipc(_host: str, _stall_s: float, _seal: Seal, _port: int) -> PageTransport:
    from twostroke.transfer.cuda_ipc import CudaIpcTransport  # loads torch

    return CudaIpcTransport()


def _open_nixl(host: str, _stall_s: float, seal: Seal, _port: int) -> PageTransport:
    from twostroke.transfer.nixl import NixlTransport  # may not be installed

    return NixlTransport(host, seal)


ONE_HOST = frozenset({"cuda_ipc", "shm"})
"""They lead nowhere else."""

_MAKERS: dict[str, Callable[[str, float, Seal, int], PageTransport]] = {
    "cuda_ipc": _open_cuda_ipc,
    "shm": lambda _host, _stall_s, _seal, _port: ShmTransport(),
    "nixl": _open_nixl,
    "tcp": TcpTransport,
}


def default_names(memory: Pages) -> tuple[str, ...]:
    """What suits the pages' memory, best first. nixl is for whoever names it: it needs a network to be trusted."""
    return ("shm", "tcp") if isinstance(memory, PageMemory) else ("cuda_ipc", "tcp")


def check_names(names: Sequence[str]) -> None:
    """Raise ConfigError unless these are known transports, each once."""
    if not names or len(set(names)) != len(names) or not set(names) <= set(_MAKERS):
        known = ", ".join(_MAKERS)
        raise ConfigError(f"--transports must be some of {known}, each once; got {list(names)}", field="transports")


def open_transports(
    names: Sequence[str], host: str, stall_s: float, seal: Seal = PLAIN, port: int = 0
) -> list[PageTransport]:
    """One transport per name, in this order of preference; `host` is the interface that network ones bind to, and
    `port` is that of tcp. Pulls of which no byte moves for `stall_s` fail (where one can see that). `seal`: of what
    leaves the host."""
    check_names(names)
    return [_MAKERS[name](host, stall_s, seal, port) for name in names]


def outranked(chosen: PageTransport, endpoints: Sequence[Endpoint], transports: Sequence[PageTransport]) -> list[str]:
    """Better ones than the chosen that should have led there: to another host, those of one host need not."""
    is_here = any(endpoint.host_id == host_id() for endpoint in endpoints)
    better = [transport.name for transport in transports[: transports.index(chosen)]]
    return [name for name in better if is_here or name not in ONE_HOST]


def leading_to(
    endpoints: Sequence[Endpoint], transports: Sequence[PageTransport]
) -> list[tuple[PageTransport, Endpoint]]:
    """Our transports that reach one of the peer's endpoints each, best first: at least one.

    Raises ConfigError where both have no transport in common, PeerLost where the common ones do not lead there.
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
