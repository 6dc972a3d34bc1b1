"""How clients of a server go through a gRPC door that takes TLS."""

from __future__ import annotations

import grpc

from cluster.flags.client_tls import ClientTls
from twostroke.rpc.channel import Door


def door_of(tls: ClientTls) -> Door:
    """Raises ConfigError."""
    options = () if tls.name is None else (("grpc.ssl_target_name_override", tls.name),)
    return Door(grpc.ssl_channel_credentials(*tls.pem()), options)
