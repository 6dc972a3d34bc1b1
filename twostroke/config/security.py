"""Paths of the certificates of the endpoints and of the cluster. `twostroke.security.tls` reads the files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twostroke.base.credentials import CLUSTER_NAME, TlsConfig
from twostroke.base.errors import ConfigError
from twostroke.config.settings import Settings, setting


class CertificatesConfig(Settings):
    tls_cert: str | None = setting(
        None,
        is_path=True,
        unit="FILE",
        help="certificate in PEM: HTTP and gRPC for clients take TLS",
        default_text="plain",
    )
    tls_key: str | None = setting(None, is_path=True, unit="FILE", help="private key of --tls-cert, without a password")
    tls_client_ca: str | None = setting(
        None,
        is_path=True,
        unit="FILE",
        help="CA: clients must show a certificate that comes from it, over TLS 1.3",
        default_text="none",
    )
    cluster_tls_cert: str | None = setting(
        None,
        is_path=True,
        unit="FILE",
        help="certificate in PEM, on every host: workers, routers and supervisor speak mutual TLS; it names "
        f"{CLUSTER_NAME}",
        default_text="plain",
    )
    cluster_tls_key: str | None = setting(
        None, is_path=True, unit="FILE", help="private key of --cluster-tls-cert, without a password"
    )
    cluster_tls_ca: str | None = setting(
        None, is_path=True, unit="FILE", help="CA of the certificates of all processes"
    )
    unencrypted_nixl: bool = setting(
        False, help="take nixl beside --cluster-tls-cert although its pages travel in the clear"
    )

    def model_post_init(self, _context: Any) -> None:
        _all_or_none({"--tls-cert": self.tls_cert, "--tls-key": self.tls_key})
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ConfigError("--tls-client-ca needs --tls-cert and --tls-key", field="--tls-cert")
        _all_or_none(
            {
                "--cluster-tls-cert": self.cluster_tls_cert,
                "--cluster-tls-key": self.cluster_tls_key,
                "--cluster-tls-ca": self.cluster_tls_ca,
            }
        )

    def check_transports(self, transports: Sequence[str]) -> None:
        """Raises ConfigError where pages would leave the cluster's TLS unasked."""
        if self.cluster is not None and "nixl" in transports and not self.unencrypted_nixl:
            raise ConfigError(
                "--transports nixl does not go with --cluster-tls-cert, as nothing can encrypt its pages: "
                "leave it out, or say --unencrypted-nixl where their network is trusted",
                field="--transports",
            )

    @property
    def clients(self) -> TlsConfig | None:
        """For the endpoints that clients connect to. None: they are plain."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return TlsConfig(cert=self.tls_cert, key=self.tls_key, ca=self.tls_client_ca)

    @property
    def cluster(self) -> TlsConfig | None:
        """For all connections between processes of the cluster. None: they are plain."""
        if self.cluster_tls_cert is None or self.cluster_tls_key is None:
            return None
        return TlsConfig(cert=self.cluster_tls_cert, key=self.cluster_tls_key, ca=self.cluster_tls_ca)


def _all_or_none(given: dict[str, str | None]) -> None:
    missing = [flag for flag, path in given.items() if path is None]
    if 0 < len(missing) < len(given):
        there = " and ".join(flag for flag in given if flag not in missing)
        raise ConfigError(f"{there} needs {' and '.join(missing)}, too", field=missing[0])
