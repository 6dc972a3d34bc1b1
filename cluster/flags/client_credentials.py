"""What a client shows and whom it trusts: an API key from the environment, and TLS by flags."""

from __future__ import annotations

import argparse
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twostroke.base.errors import ConfigError

API_KEY_VARIABLE = "TWOSTROKE_API_KEY"
_FLAGS = {
    "tls_ca": ("FILE", "TLS: the server's certificate comes from here, PEM (default: the system's CAs)"),
    "tls_cert": ("FILE", "certificate of this client, PEM, for servers with --tls-client-ca"),
    "tls_key": ("FILE", "of --tls-cert"),
    "tls_name": ("NAME", "TLS: the server's certificate names this (default: the host of its address)"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTls:
    """The CA that a client trusts, and the certificate that it shows."""

    ca: bytes | None = None
    """CA certificates in PEM; None means the system's."""
    cert: str | None = None
    key: str | None = None
    name: str | None = None
    """Name that the server's certificate must have; None means the host of its address."""

    def context(self) -> ssl.SSLContext:
        """Returns a TLS context that always checks for `name`. Raises ConfigError."""
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
        """Returns CA, key and certificate. Raises ConfigError."""
        key, cert = (
            None if path is None else _read(flag, path)
            for flag, path in (("--tls-key", self.key), ("--tls-cert", self.cert))
        )
        return self.ca, key, cert


class _Naming(ssl.SSLContext):
    """A TLS context that checks for a fixed name. Callers that connect by address cannot always pass one."""

    name: str | None = None

    def wrap_socket(self, *made_of: Any, **options: Any) -> ssl.SSLSocket:
        return super().wrap_socket(*made_of, **self._named(options))

    def wrap_bio(self, *made_of: Any, **options: Any) -> ssl.SSLObject:
        return super().wrap_bio(*made_of, **self._named(options))

    def _named(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {**options, "server_hostname": self.name or options.get("server_hostname")}


def api_key() -> str:
    """Returns the key in the environment; empty without one."""
    return os.environ.get(API_KEY_VARIABLE, "").strip()


def authorization(key: str) -> dict[str, str]:
    """Returns the HTTP header, or the metadata of a call, that carries the key."""
    return {"authorization": f"Bearer {key}"} if key else {}


def add_tls_flags(parser: argparse._ActionsContainer) -> None:
    for name, (kind, description) in _FLAGS.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            default=os.environ.get(tls_variable(name)) or None,
            metavar=kind,
            help=f"{description} (environment: {tls_variable(name)})",
        )


def tls_variable(name: str) -> str:
    """Returns the variable of the environment that stands for a flag."""
    return f"TWOSTROKE_{name.upper()}"


def tls_from(args: argparse.Namespace) -> ClientTls | None:
    """Returns what the flags say; None where none was given. Raises ConfigError that names the flag."""
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
