"""`twostroke router`: one router, restarted by the system's service manager or Kubernetes instead of a launcher.

It is configured only by flags and environment. It finds workers through the Fleet service; while that is away, it is
not ready and waits.
"""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

from cluster import ports
from cluster.fetching import fetch_with_progress
from cluster.flags.choices import CHOICES
from cluster.flags.tls import check as check_tls
from cluster.flags.token import read as read_token
from cluster.values.spec import RouterPorts
from twostroke.base.credentials import TOKEN_VARIABLE
from twostroke.base.errors import ConfigError
from twostroke.config import ModelConfig, RouterCommand, RouterConfig, flags
from twostroke.models.catalog.places import TOKENIZER_FILES, locate

EVERY_INTERFACE = ("0.0.0.0", "::", "[::]")
ELSEWHERE = ("192.0.2.1", 9)
"""An address that no host has. No packet is sent to find the route there."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, RouterCommand, CHOICES)


def run(args: argparse.Namespace) -> int:
    from router.__main__ import run as run_router  # imported here: help needs none of it

    return run_router(lambda: config_from(args))


def config_from(args: argparse.Namespace) -> RouterConfig:
    """Raises ConfigError that names the flag."""
    command = flags.read(RouterCommand, args)
    given, listen, endpoints = command.router, command.router.listen, command.router.endpoints
    host, port = _host_and_port(command.fleet)
    if command.token_file is None:
        raise ConfigError(
            f"--token-file (or ${TOKEN_VARIABLE}) is missing: the file with the fleet's secret", field="--token-file"
        )
    by_flag = RouterPorts(listen.http_port, listen.grpc_port, endpoints.admin_port, endpoints.metrics_port).by_flag()
    ports.check_distinct({**by_flag, "--peer-port": given.peer_port}, {})
    check_tls(command.certificates)
    model = ModelConfig(model=command.model, dtype=command.dtype, served_model_name=command.served_model_name)
    config = given.replace(
        tls=command.certificates.clients,
        cluster_tls=command.certificates.cluster,
        fleet_address=command.fleet,
        peer_host=given.peer_host or _own_address(listen.host, host, port),
        cluster_token=read_token(command.token_file),
        model_dir=_tokenizer_dir(model),
        served_model_name=model.public_name,
    )
    ports.check_endpoints(listen.host, endpoints.metrics_host, by_flag)
    return config


def _host_and_port(address: str) -> tuple[str, int]:
    host, _colon, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"--fleet must be HOST:PORT of the Fleet service, got {address!r}", field="--fleet")
    return host.strip("[]"), int(port)


def _own_address(listening: str, fleet_host: str, fleet_port: int) -> str:
    """Returns this host's address on the way to the fleet, or on any route; empty where `listening` is one."""
    if listening not in EVERY_INTERFACE:
        return ""
    for target in ((fleet_host, fleet_port), ELSEWHERE):
        try:
            family, _kind, _protocol, _name, address = socket.getaddrinfo(*target, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                own = str(probe.getsockname()[0])
        except OSError:
            continue
        return f"[{own}]" if ":" in own else own
    return ""


def _tokenizer_dir(model: ModelConfig) -> str:
    """Returns the tokenizer's folder, fetched first if need be; empty for a paced model, whose text is bytes."""
    if model.is_paced:
        return ""
    directory = Path(model.model).expanduser()
    if directory.is_dir() and (directory / TOKENIZER_FILES[0]).is_file():
        return str(directory.resolve())  # weights are not needed: nothing is computed here
    return str(locate(model.model, model.dtype) or fetch_with_progress(model.model, model.dtype))
