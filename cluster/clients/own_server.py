"""The server that clients mean when no address is given: this user's own, which its state file describes."""

from __future__ import annotations

from cluster import state_file
from cluster.flags.client_tls import ClientTls
from cluster.state_file import ServeState
from twostroke.errors import ConfigError


def own_server(pid: int | None, secure: ClientTls | None) -> ServeState:
    """Raises NotFound or ConfigError that says which flag is missing."""
    state = state_file.the_one_running(pid)
    if state.has_tls and secure is None:
        raise ConfigError(
            "this user's server speaks TLS: say --tls-ca FILE, the CA that its certificate comes from", field="--tls-ca"
        )
    return state
