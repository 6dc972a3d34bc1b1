"""What a process proves to the others of its cluster, and wants them to prove."""

from __future__ import annotations

from dataclasses import dataclass, field

from twostroke.base.credentials import TlsConfig
from twostroke.security.tls import Certificates, CertificateUse


@dataclass(frozen=True, slots=True)
class Membership:
    token: str = field(repr=False)
    certificates: Certificates | None = None
    """None: connections are plain."""

    @classmethod
    def of(cls, token: str, tls: TlsConfig | None) -> Membership:
        """Raises ConfigError where the certificates cannot be used."""
        return cls(token, None if tls is None else Certificates(tls, CertificateUse.CLUSTER))
