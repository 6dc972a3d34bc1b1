"""Places of what a process proves itself with: files of certificates, and the cluster's token.

It is apart from `twostroke.config`, because commands that only ask a server need no settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

CLUSTER_NAME = "twostroke.cluster"
"""What the certificate of every process of a cluster says that it is for, beside its host or instead of it: whoever
connects looks for this name, whatever the address. Pods and hosts come and go; certificates need not name them."""
TOKEN_VARIABLE = "TWOSTROKE_TOKEN_FILE"
"""The environment variable that names the file with the cluster's token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """PEM files of one certificate. They may change at any time: new connections use what is in them then."""

    __pydantic_config__: ClassVar[dict[str, bool]] = {
        "strict": False
    }  # read from JSON within settings, which are strict
    cert: str
    """The certificate, followed by those between it and its CA."""
    key: str
    """Its private key, without a password."""
    ca: str | None = None
    """CAs that the other side's certificate must come from. None: the other side needs none."""
