"""The operator's key: what the console asks for. It is made of the cluster's token, and does not tell that token."""

from __future__ import annotations

import hashlib
import hmac

PREFIX = "tso-"
"""Begins every operator's key, as `ts-` begins those of clients."""


def operator_key(cluster_token: str) -> str:
    """Returns the key. All routers of a cluster have the same one, and it changes with the cluster's token.

    Whoever has it can do what the console can. It does not open the ports of workers or the supervisor.
    """
    digest = hashlib.blake2b(cluster_token.encode(), digest_size=32, person=b"operator's key")
    return PREFIX + digest.hexdigest()


class OperatorKey:
    """Recognises the key in an Authorization header. A cluster without a token has no such key."""

    def __init__(self, cluster_token: str) -> None:
        self._expected = f"Bearer {operator_key(cluster_token)}".encode() if cluster_token else b""

    def is_in(self, authorization: str) -> bool:
        return bool(self._expected) and hmac.compare_digest(authorization.encode(), self._expected)
