"""How clients of a server speak TLS: whom they believe, and what they show."""

from __future__ import annotations

import argparse
import os
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from twostroke.errors import ConfigError
from twostroke.rpc.channel import Door

_FLAGS = {
    "tls_ca": ("FILE", "TLS: the server's certificate comes from here, PEM (default: plain; or the system's CAs)"),
    "tls_cert": ("FILE", "certificate of this client, PEM, for servers with --tls-client-ca"),
    "tls_key": ("FILE", "of --tls-cert"),
    "tls_name": ("NAME", "TLS: the server's certificate names this (default: the host of its address)"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTls:
    ca: bytes | None = None
    """PEM. None: the system's."""
    cert: str | None = None
    key: str | None = None
    name: str | None = None
    """That the server's certificate must have. None: the host of its address."""

    def context(self) -> ssl.SSLContext:
        """Raises ConfigError."""
        context = ssl.create_default_context(cadata=None if self.ca is None else self.ca.decode("latin-1"))
        if self.cert is not None:
            try:
                context.load_cert_chain(self.cert, self.key, password=lambda: "")
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(
                    f"--tls-cert {self.cert} with --tls-key {self.key}: {error}", field="--tls-cert"
                ) from error
        return context

    def door(self) -> Door:
        """Of gRPC. Raises ConfigError."""
        cert, key = (
            None if path is None else _read(flag, path)
            for flag, path in (("--tls-cert", self.cert), ("--tls-key", self.key))
        )
        options = () if self.name is None else (("grpc.ssl_target_name_override", self.name),)
        return Door(grpc.ssl_channel_credentials(self.ca, key, cert), options)


def add_arguments(parser: argparse._ActionsContainer) -> None:
    for name, (kind, said) in _FLAGS.items():
        variable = f"TWOSTROKE_{name.upper()}"
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            default=os.environ.get(variable) or None,
            metavar=kind,
            help=f"{said} (environment: {variable})",
        )
    parser.add_argument("--tls", action="store_true", help="TLS with the system's CAs; the flags above mean it, too")


def from_args(args: argparse.Namespace) -> ClientTls | None:
    """None: the server is spoken to in plain. Raises ConfigError that names the flag."""
    given = (args.tls_ca, args.tls_cert, args.tls_key, args.tls_name)
    if not args.tls and not any(given):
        return None
    if (args.tls_cert is None) != (args.tls_key is None):
        there, missing = ("--tls-cert", "--tls-key") if args.tls_key is None else ("--tls-key", "--tls-cert")
        raise ConfigError(f"{there} needs {missing}, too", field=missing)
    ca = None if args.tls_ca is None else _read("--tls-ca", args.tls_ca)
    tls = ClientTls(ca=ca, cert=args.tls_cert, key=args.tls_key, name=args.tls_name)
    try:
        tls.context()
    except ssl.SSLError as error:
        raise ConfigError(f"--tls-ca {args.tls_ca} holds no certificate: {error.reason}", field="--tls-ca") from error
    return tls


def _read(flag: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}", field=flag) from error
