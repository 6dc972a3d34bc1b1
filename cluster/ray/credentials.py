"""Checks the token and the certificates for Ray's head before Ray is loaded, which would try for minutes.

Ray reads them from environment variables. `environment` passes these on to worker processes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
from pathlib import Path

import grpc

from twostroke.base.errors import ConfigError

MODES = ("token", "disabled")
CERTIFICATES = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
HANDSHAKE_S = 3.0
NO_TLS = "WRONG_VERSION_NUMBER"
"""OpenSSL's reason for a reply that is not TLS."""


def check() -> ssl.SSLContext | None:
    """Returns the TLS context for the head; None without TLS. Raises ConfigError that names the variable."""
    mode = os.environ.get("RAY_AUTH_MODE")
    if mode and mode not in MODES:
        raise ConfigError(f"RAY_AUTH_MODE must be {' or '.join(MODES)}, got {mode!r}", field="RAY_AUTH_MODE")
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    if path and not os.environ.get("RAY_AUTH_TOKEN") and mode != "disabled":
        _check_file("RAY_AUTH_TOKEN_PATH", path)
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    for name in CERTIFICATES:
        if not os.environ.get(name):
            raise ConfigError(f"RAY_USE_TLS needs {', '.join(CERTIFICATES)}, and {name} is not set", field=name)
        _check_file(name, os.environ[name])
    cert, key, ca = (os.environ[name] for name in CERTIFICATES)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # Ray looks at the name
    context.set_alpn_protocols(["h2"])
    try:
        context.load_cert_chain(cert, key, password=lambda: "")
    except ssl.SSLError as error:
        raise ConfigError(
            f"RAY_TLS_SERVER_CERT {cert} with RAY_TLS_SERVER_KEY {key}: {error.reason}", field="RAY_TLS_SERVER_CERT"
        ) from error
    try:
        context.load_verify_locations(ca)
    except ssl.SSLError as error:
        raise ConfigError(f"RAY_TLS_CA_CERT {ca} holds no certificate", field="RAY_TLS_CA_CERT") from error
    return context


def check_head(host: str, port: int, context: ssl.SSLContext | None) -> None:
    """Raises ConfigError where only one of the two speaks TLS, or where the head shows another CA's certificate."""
    why = _refuses_plain(host, port) if context is None else _refuses_tls(host, port, context)
    if why:
        raise ConfigError(f"--address {host}:{port}: Ray's head {why}", field="--address")


def _refuses_plain(host: str, port: int) -> str:
    """Returns why we cannot speak without TLS; empty where nothing speaks TLS there."""
    with contextlib.suppress(OSError):  # SSLError is one
        _shake_hands(host, port, _trusting())
        return f"speaks TLS: set RAY_USE_TLS=1, {', '.join(CERTIFICATES)}"
    return ""


def _refuses_tls(host: str, port: int, context: ssl.SSLContext) -> str:
    """Returns why we cannot speak TLS; empty where we can, or where only a call can tell."""
    try:
        _shake_hands(host, port, context)
    except ssl.SSLCertVerificationError as error:
        return f"shows a certificate that RAY_TLS_CA_CERT does not take: {error.verify_message}"
    except ssl.SSLError as error:
        return "does not speak TLS, and RAY_USE_TLS is set here" if error.reason == NO_TLS else ""
    except OSError as error:
        return f"does not speak TLS within {HANDSHAKE_S:g} s: {error}"
    return ""


def channel_to(host: str, port: int, context: ssl.SSLContext | None) -> grpc.Channel:
    """Opens a channel to the head. A certificate for another name of its host fails here, not in Ray."""
    if context is None:
        return grpc.insecure_channel(f"{host}:{port}")
    cert, key, ca = (Path(os.environ[name]).read_bytes() for name in CERTIFICATES)
    return grpc.secure_channel(f"{host}:{port}", grpc.ssl_channel_credentials(ca, key, cert))


def _shake_hands(host: str, port: int, context: ssl.SSLContext) -> None:
    with socket.create_connection((host.strip("[]"), port), HANDSHAKE_S) as connection:
        context.wrap_socket(connection, server_hostname=None).close()


def _trusting() -> ssl.SSLContext:
    """Returns a context that accepts any certificate, to find out whether the other side speaks TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


def _check_file(name: str, path: str) -> None:
    try:
        with contextlib.closing(Path(path).open("rb")) as file:
            is_empty = not file.read(1)
    except OSError as error:
        raise ConfigError(f"{name} {path}: {error.strerror}", field=name) from error
    if is_empty:
        raise ConfigError(f"{name} {path}: the file is empty", field=name)
