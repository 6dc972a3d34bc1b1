"""Checks whether ports are free and chooses one for the Fleet service."""

from __future__ import annotations

import random
import socket
from collections.abc import Mapping

from twostroke.base.errors import ConfigError

FLEET_PORTS = range(20_000, 30_000)
"""Ports below the kernel's ephemeral range, so that no outgoing connection takes one while the supervisor restarts."""
TRIED_PORTS = 100
"""Random candidates for the Fleet service. Where none of them is free, something is wrong with the host."""


def is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def check(host: str, flag: str, port: int) -> None:
    """Checks that this process can listen there; raises ConfigError otherwise. Port 0 means any free port."""
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"{flag} must be from 0 to 65535, got {port}", field=flag)
    try:
        socket.getaddrinfo(host, port)
    except OSError as error:
        raise ConfigError(f"--host {host}: {error}", field="--host") from error
    if not is_free(host, 0):
        raise ConfigError(f"--host {host} is not an address of this machine", field="--host")
    if not is_free(host, port):
        raise ConfigError(f"{flag} {port} is in use on {host}; choose another or stop what listens there", field=flag)


def check_endpoints(host: str, metrics_host: str | None, by_flag: Mapping[str, int]) -> None:
    """Checks the ports of one router."""
    for flag, port in by_flag.items():
        check((metrics_host if flag == "--metrics-port" else None) or host, flag, port)


def check_distinct(by_flag: Mapping[str, int], taken: dict[int, str], suffix: str = "") -> None:
    """Checks that no two flags name one port; 0 is never taken. `taken` is extended. Raises ConfigError."""
    for flag, port in by_flag.items():
        if port and port in taken:
            raise ConfigError(f"{taken[port]} and {flag} are both {port}{suffix}", field=flag)
        taken[port] = flag


def fleet_port(host: str) -> int:
    candidates = random.SystemRandom().sample(FLEET_PORTS, TRIED_PORTS)
    free = next((port for port in candidates if is_free(host, port)), None)
    if free is None:
        raise ConfigError(
            f"none of the {len(candidates)} ports that were tried from {FLEET_PORTS.start} to {FLEET_PORTS.stop - 1} "
            f"is free on {host}"
        )
    return free
