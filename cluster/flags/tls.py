"""Checks the certificates that settings name."""

from __future__ import annotations

from cluster.flags.token import check_private
from twostroke.config import CertificatesConfig
from twostroke.security.tls import check_certificates


def check(certificates: CertificatesConfig) -> None:
    """Raises ConfigError where files cannot be used, or where others may read a key."""
    check_certificates(certificates.clients, certificates.cluster)
    for flag, tls in (("--tls-key", certificates.clients), ("--cluster-tls-key", certificates.cluster)):
        if tls is not None:
            check_private(flag, tls.key)
