"""Flags for certificates: of the doors that clients come through, and of connections between processes."""

from __future__ import annotations

import argparse
from pathlib import Path

from cluster.flags.token import check_private
from twostroke.errors import ConfigError
from twostroke.tls import check_certificates
from twostroke.tls_config import CLUSTER_NAME, TlsConfig


def add(group: argparse._ActionsContainer) -> None:
    group.add_argument("--tls-cert", metavar="FILE", help="PEM: HTTP and gRPC for clients take TLS (default: plain)")
    group.add_argument("--tls-key", metavar="FILE", help="of --tls-cert, without a password")
    group.add_argument(
        "--tls-client-ca", metavar="FILE", help="clients must show a certificate from here (default: none)"
    )
    group.add_argument(
        "--cluster-tls-cert",
        metavar="FILE",
        help=f"PEM, on every host: workers, routers and supervisor speak mutual TLS; it names {CLUSTER_NAME} "
        "(default: plain)",
    )
    group.add_argument("--cluster-tls-key", metavar="FILE", help="of --cluster-tls-cert, without a password")
    group.add_argument("--cluster-tls-ca", metavar="FILE", help="where all their certificates come from")
    group.add_argument(
        "--unencrypted-nixl",
        action="store_true",
        help="take nixl beside --cluster-tls-cert although its pages travel in the clear",
    )


def doors_from(args: argparse.Namespace) -> TlsConfig | None:
    """Raises ConfigError that names the flag that is missing."""
    config = _config(args.tls_cert, args.tls_key, args.tls_client_ca, "--tls-cert", "--tls-key")
    if config is None and args.tls_client_ca is not None:
        raise ConfigError("--tls-client-ca needs --tls-cert and --tls-key", field="--tls-cert")
    return config


def cluster_from(args: argparse.Namespace) -> TlsConfig | None:
    """Raises ConfigError that names the flag that is missing."""
    cert, key, ca = args.cluster_tls_cert, args.cluster_tls_key, args.cluster_tls_ca
    given = {"--cluster-tls-cert": cert, "--cluster-tls-key": key, "--cluster-tls-ca": ca}
    missing = [flag for flag, path in given.items() if path is None]
    if 0 < len(missing) < len(given):
        there = " and ".join(flag for flag in given if flag not in missing)
        raise ConfigError(f"{there} needs {' and '.join(missing)}, too", field=missing[0])
    return _config(cert, key, ca, "--cluster-tls-cert", "--cluster-tls-key")


def check(doors: TlsConfig | None, cluster: TlsConfig | None) -> None:
    """Raises ConfigError where files cannot be used, or where a key is no secret."""
    check_certificates(doors, cluster)
    for flag, tls in (("--tls-key", doors), ("--cluster-tls-key", cluster)):
        if tls is not None:
            check_private(flag, tls.key)


def _config(cert: str | None, key: str | None, ca: str | None, cert_flag: str, key_flag: str) -> TlsConfig | None:
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        there, missing = (key_flag, cert_flag) if cert is None else (cert_flag, key_flag)
        raise ConfigError(f"{there} needs {missing}, too", field=missing)
    return TlsConfig(cert=_absolute(cert), key=_absolute(key), ca=None if ca is None else _absolute(ca))


def _absolute(path: str) -> str:
    """Other processes do not stand where the user stands."""
    return str(Path(path).expanduser().absolute())
