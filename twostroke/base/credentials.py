"""Places of what a process proves itself with: files of certificates, and the cluster's token.

It is apart from `twostroke.config`, because commands that only ask a server need no settings.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import ClassVar

CLUSTER_NAME = "twostroke.cluster"
"""A name in the certificate of every process of a cluster, in addition to its host or instead of it. A client checks
for this name, whatever the address. Pods and hosts come and go; certificates need not name them."""
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
    """The certificate's private key, without a password."""
    ca: str | None = None
    """CAs that the other side's certificate must come from. None: the other side needs none."""


def prove(secret: str, purpose: str, *statements: bytes | str) -> bytes:
    """Returns a proof that whoever makes these statements knows `secret`: HMAC-SHA256, each part with its length.

    The proof does not reveal the secret. `purpose` keeps a proof of one kind from passing for another. Whoever sees a
    proof can try guesses at the secret, so the secret must be hard to guess, as `secrets.token_hex(32)` is.
    """
    parts = [part.encode() if isinstance(part, str) else part for part in (purpose, *statements)]
    message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(secret.encode(), message, "sha256")
