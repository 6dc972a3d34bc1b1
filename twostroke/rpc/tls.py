"""Certificates as gRPC takes them: servers ask for them at every handshake, clients when they open a channel."""

from __future__ import annotations

import grpc
import grpc.aio

from twostroke.tls import Certificates, Pem
from twostroke.tls_config import CLUSTER_NAME

_NAME_OPTION = ("grpc.ssl_target_name_override", CLUSTER_NAME)


def server_credentials(certificates: Certificates | None) -> grpc.ServerCredentials:
    if certificates is None:
        return grpc.insecure_server_credentials()
    served = certificates.pem

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        """Called on a thread of gRPC's before each handshake; None: as before."""
        nonlocal served
        pem = certificates.pem
        if pem is served:
            return None
        served = pem
        return _configuration(pem)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(served),
        renewed,  # type: ignore[arg-type]  # the stubs know of no None
        certificates.asks_clients,
    )


def open_channel(
    address: str, certificates: Certificates | None, options: tuple[tuple[str, int], ...]
) -> grpc.aio.Channel:
    """To another process of the cluster; with certificates, both sides look at each other's."""
    if certificates is None:
        return grpc.aio.insecure_channel(address, options=list(options))
    pem = certificates.pem
    credentials = grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert)
    return grpc.aio.secure_channel(address, credentials, options=[*options, _NAME_OPTION])


def _configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], pem.ca)
