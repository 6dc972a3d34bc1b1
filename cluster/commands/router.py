"""`twostroke router`: a router that nobody looks after but the system's own supervisor, or Kubernetes.

Flags and environment tell it everything. It finds workers through the Fleet service, and waits, not ready, for as long
as that is not there.
"""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

from cluster import ports
from cluster.commands.serve import CHOICES
from cluster.fetching import fetch_with_progress
from cluster.flags import tls, token
from cluster.spec import RouterPorts
from twostroke.config import ModelConfig, RouterCommand, RouterConfig, flags
from twostroke.credentials import TOKEN_VARIABLE
from twostroke.errors import ConfigError
from twostroke.models.catalog import TOKENIZER_FILES, locate

EVERY_INTERFACE = ("0.0.0.0", "::", "[::]")
ELSEWHERE = ("192.0.2.1", 9)
"""An address that is nobody's: no packet is sent to find the way there."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, RouterCommand, CHOICES)


def run(args: argparse.Namespace) -> int:
    from router.__main__ import run as run_router  # only now: help needs nothing of what a router is made of

    return run_router(lambda: config_from(args))


def config_from(args: argparse.Namespace) -> RouterConfig:
    """Raises ConfigError that names the flag."""
    told = flags.read(RouterCommand, args)
    listen, endpoints = told.listen, told.endpoints
    host, port = _host_and_port(told.fleet)
    if told.token_file is None:
        raise ConfigError(
            f"--token-file (or ${TOKEN_VARIABLE}) is missing: the file with the fleet's secret", field="--token-file"
        )
    by_flag = RouterPorts(listen.http_port, listen.grpc_port, endpoints.admin_port, endpoints.metrics_port).by_flag()
    ports.check_distinct({**by_flag, "--peer-port": told.peer_port}, {})
    tls.check(told.certificates)
    model = ModelConfig(model=told.model, dtype=told.dtype, served_model_name=told.served_model_name)
    config = RouterConfig(
        listen=listen,
        endpoints=endpoints,
        tls=told.certificates.clients,
        cluster_tls=told.certificates.cluster,
        fleet_address=told.fleet,
        peer_host=told.peer_host or _own_address(listen.host, host, port),
        cluster_token=token.read(told.token_file),
        model_dir=_tokenizer_dir(model),
        served_model_name=model.public_name,
        peer_port=told.peer_port,
        rank=told.rank,
        drain_grace_s=told.drain_grace_s,
        routing=told.routing,
        tracing=told.tracing,
        patience=told.patience,
    )
    ports.check_endpoints(listen.host, endpoints.metrics_host, by_flag)
    return config


def _host_and_port(address: str) -> tuple[str, int]:
    host, _colon, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"--fleet must be HOST:PORT of the Fleet service, got {address!r}", field="--fleet")
    return host.strip("[]"), int(port)


def _own_address(listening: str, fleet_host: str, fleet_port: int) -> str:
    """Empty where `listening` is an address already. The fleet's name may not be known yet: then any way out."""
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
    """Fetched first if need be; empty for a paced model, whose text is bytes."""
    if model.is_paced:
        return ""
    directory = Path(model.model).expanduser()
    if directory.is_dir() and (directory / TOKENIZER_FILES[0]).is_file():
        return str(directory.resolve())  # without weights, too: nothing is computed here
    return str(locate(model.model, model.dtype) or fetch_with_progress(model.model, model.dtype))
