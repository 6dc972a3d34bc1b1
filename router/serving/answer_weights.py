"""Which weights answer a client's request: those that its first token comes from, whatever is loaded meanwhile."""

from __future__ import annotations

import functools
import hashlib

from twostroke.base.errors import WeightsChanged
from twostroke.request import AdapterRef

MARK_BYTES = 8
"""Bytes of a mark, which every resume token carries: a fleet has seen some thousand weights and adapters at most."""


class AnswerWeights:
    """The weights of all choices of one client's request. They are free until the first token of any choice."""

    def __init__(self, mark: str = "") -> None:
        """`mark` is that of the tokens that the client of a resumed stream has; empty where it has none."""
        self.mark = mark

    @property
    def are_fixed(self) -> bool:
        return bool(self.mark)

    def admit(self, fingerprint: str, adapter: AdapterRef | None) -> bool:
        """Tells whether a worker with this fingerprint may compute the next token."""
        return fingerprint != "" and self.mark in ("", weights_mark(fingerprint, adapter_digest(adapter)))

    def fix(self, fingerprint: str, adapter: AdapterRef | None) -> bool:
        """Notes that a token was computed by a worker with this fingerprint. Returns False where it must not count."""
        if not self.admit(fingerprint, adapter):
            return False
        self.mark = weights_mark(fingerprint, adapter_digest(adapter))
        return True


@functools.lru_cache(maxsize=1024)
def weights_mark(fingerprint: str, adapter: bytes) -> str:
    """Returns a digest of the fingerprint of a worker and of an adapter's bytes, as text."""
    return hashlib.blake2b(adapter + fingerprint.encode(), digest_size=MARK_BYTES, person=b"answer weights").hexdigest()


def changed(request_id: str) -> WeightsChanged:
    """Returns the error of an answer that only weights or an adapter could go on with that no worker has any more."""
    return WeightsChanged(
        f"the answer {request_id} was begun with weights, or an adapter, that were replaced before its end, and cannot "
        "go on with others; send the request again"
    )


def adapter_digest(adapter: AdapterRef | None) -> bytes:
    return b"" if adapter is None else adapter.digest
