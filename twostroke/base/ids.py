"""Names of things: every id is its own type, so that none is mistaken for another."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import NewType

BlockHash = NewType("BlockHash", bytes)
"""16 bytes of keyed BLAKE2b over (parent block's name, its tokens, salt): see `kv_cache.block`."""

PageId = NewType("PageId", int)
"""Index of a page in its worker's pool, 0-based."""

RequestId = NewType("RequestId", str)
"""One answer stream on a decode worker: "<client's request id>#<choice index>"."""

WorkerId = NewType("WorkerId", str)
"""Stable over a worker's epochs: "prefill-0", "decode-1"."""

RouterId = NewType("RouterId", str)
"""One router process, from its start to its end."""

SessionId = NewType("SessionId", int)
"""One writer of pages within one epoch of a worker: a pull, or a sequence that computes."""

PinId = NewType("PinId", str)
"""One pin: 16 hex digits of its owner, tenant and blocks (see `twostroke.kv_cache.pins`)."""

_EPOCH = re.compile(r"([0-9]{1,18})\.([0-9a-f]{1,16})")


@dataclass(frozen=True, slots=True, order=True)
class Epoch:
    """One worker process in one role. A higher incarnation wins; the random half tells two processes apart for sure."""

    incarnation: int
    nonce: int

    @classmethod
    def begin(cls, incarnation: int) -> Epoch:
        return cls(incarnation, secrets.randbits(63))

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.nonce:016x}"

    @classmethod
    def parse(cls, text: str) -> Epoch:
        """Raises ValueError."""
        found = _EPOCH.fullmatch(text)
        if found is None:
            raise ValueError(f"not an epoch: {text[:64]!r}")
        return cls(int(found[1]), int(found[2], 16))
