"""Finds the address of the Ray head to join, and checks that a head answers there, before Ray is imported."""

from __future__ import annotations

import os
import socket
import ssl
import time
from pathlib import Path

import grpc

from cluster.ray import credentials as ray_credentials
from cluster.terminal.announce import Announcer
from twostroke.base.errors import ConfigError

AUTO = "auto"
CONNECT_S = 5.0
"""Seconds for opening a TCP connection to the head."""
PAUSE_S = 0.5
"""Seconds between two tries to reach a head that is not up yet."""
HEAD_S = 4.0
"""Seconds for Ray's head to answer. Ray itself would try for two minutes, whatever listens there."""
GET_CLUSTER_ID = "/ray.rpc.NodeInfoGcsService/GetClusterId"
"""The first method that Ray itself calls on a head. Every head has it."""
CURRENT = Path("/tmp/ray/ray_current_cluster")
"""A file that `ray start` writes."""


def ray_head_address(address: str, wait_s: float = 0.0, announcer: Announcer | None = None) -> str:
    """Returns HOST:PORT once a head answers. Raises ConfigError where none has after `wait_s` or one refuses us."""
    address = _here() if address == AUTO else address
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"--address must be HOST:PORT of a Ray head, or {AUTO}, got {address!r}", field="--address")
    context = ray_credentials.check()
    until_s = time.monotonic() + wait_s
    while (error := _try(host, int(port), context)) is not None:
        if time.monotonic() >= until_s:
            raise ConfigError(
                f"--address {address}: {error}; is Ray's head up (ray start --head), and is this its port?",
                field="--address",
            )
        announcer = announcer or Announcer()
        announcer.say_once(f"waiting for Ray's head at {address}")
        time.sleep(PAUSE_S)
    return address


def _try(host: str, port: int, context: ssl.SSLContext | None) -> str | None:
    """Returns why a process cannot join there now, or None. Raises ConfigError where waiting would not help."""
    try:
        socket.create_connection((host.strip("[]"), port), CONNECT_S).close()
    except OSError as error:
        return f"nothing answers there: {error}"
    except UnicodeError:  # such a name cannot be looked up
        return "nothing answers there: not the name of a host"
    ray_credentials.check_head(host, port, context)
    with ray_credentials.channel_to(host, port, context) as channel:
        ask: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(GET_CLUSTER_ID)
        try:
            ask(b"", timeout=HEAD_S)
        except grpc.RpcError as error:
            code = error.code()
            if (code in _NO_RPC and context is None) or code is grpc.StatusCode.UNIMPLEMENTED:
                return "what answers there is not a Ray head"
    return None


_NO_RPC = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNKNOWN})
"""Statuses that a Ray head never returns. After any other one it is a head, which may ask for a token first."""


def _here() -> str:
    """Returns the address of the Ray job that this process is part of, else of the Ray cluster on this node."""
    if address := os.environ.get("RAY_ADDRESS"):
        return address
    try:
        return CURRENT.read_text().strip()
    except OSError as error:
        raise ConfigError(
            f"--address {AUTO}: this node is in no Ray cluster ({CURRENT} is missing, RAY_ADDRESS is not set); "
            "write HOST:PORT of its head",
            field="--address",
        ) from error
