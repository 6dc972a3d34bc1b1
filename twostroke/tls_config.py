"""Where the certificates of a door, or of a cluster, lie. Paths only: what is in the files is `twostroke.tls`'s."""

from __future__ import annotations

from dataclasses import dataclass

CLUSTER_NAME = "twostroke.cluster"
"""What the certificate of every process of a cluster says that it is for, beside its host or instead of it: whoever
connects looks for this name, whatever the address. Pods and hosts come and go; certificates need not name them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """PEM files of one certificate. They may change at any time: new connections use what is in them then."""

    cert: str
    """The certificate, followed by those between it and its CA."""
    key: str
    """Its private key, without a password."""
    ca: str | None = None
    """CAs that the other side's certificate must come from. None: the other side needs none."""
