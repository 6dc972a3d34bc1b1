"""Flags of commands that are clients of a server which takes TLS: whom they believe, and what they show."""

from __future__ import annotations

import argparse
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twostroke.errors import ConfigError

_FLAGS = {
    "tls_ca": ("FILE", "TLS: the server's certificate comes from here, PEM (default: the system's CAs)"),
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
    """The name that the server's certificate must have. None: the host of its address."""

    def context(self) -> ssl.SSLContext:
        """Looks for `name`, whatever it is told. Raises ConfigError."""
        context = _Naming(ssl.PROTOCOL_TLS_CLIENT)
        context.name = self.name
        if self.ca is None:
            context.load_default_certs()
        else:
            context.load_verify_locations(cadata=self.ca.decode("latin-1"))
        if self.cert is not None:
            try:
                context.load_cert_chain(self.cert, self.key, password=lambda: "")
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(
                    f"--tls-cert {self.cert} with --tls-key {self.key}: {error}", field="--tls-cert"
                ) from error
        return context

    def pem(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """CA, key and certificate. Raises ConfigError."""
        key, cert = (
            None if path is None else _read(flag, path)
            for flag, path in (("--tls-key", self.key), ("--tls-cert", self.cert))
        )
        return self.ca, key, cert


class _Naming(ssl.SSLContext):
    """A client that dials by address cannot always say which name it looks for."""

    name: str | None = None

    def wrap_socket(self, *made_of: Any, **options: Any) -> ssl.SSLSocket:
        return super().wrap_socket(*made_of, **self._named(options))

    def wrap_bio(self, *made_of: Any, **options: Any) -> ssl.SSLObject:
        return super().wrap_bio(*made_of, **self._named(options))

    def _named(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {**options, "server_hostname": self.name or options.get("server_hostname")}


def add(parser: argparse._ActionsContainer) -> None:
    for name, (kind, said) in _FLAGS.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            default=os.environ.get(variable(name)) or None,
            metavar=kind,
            help=f"{said} (environment: {variable(name)})",
        )


def variable(name: str) -> str:
    """The environment variable that stands for the flag."""
    return f"TWOSTROKE_{name.upper()}"


def tls_from(args: argparse.Namespace) -> ClientTls | None:
    """None: nothing was said. Raises ConfigError that names the flag."""
    if not any((args.tls_ca, args.tls_cert, args.tls_key, args.tls_name)):
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
