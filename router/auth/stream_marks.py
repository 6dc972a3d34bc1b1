"""Marks in the names of streams. A mark proves to which tenant's key a stream belongs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial

Mark = Callable[[str], str]
"""Makes a tenant's mark of a stream's name, which only routers of this cluster can. Empty: it is no tenant's."""


def unmarked(stream: str) -> str:
    return ""


def stream_marks(cluster_token: str) -> Callable[[str], Mark]:
    """Returns what makes a tenant's marks. Only routers of the cluster can make them, and each can check them."""
    key = hashlib.blake2b(cluster_token.encode(), person=b"stream owners").digest()

    def mark(tenant: str, stream: str) -> str:
        said = f"{len(tenant)} {tenant} {stream}"
        return hashlib.blake2b(said.encode(), key=key, digest_size=8).hexdigest()

    return lambda tenant: partial(mark, tenant)
