"""Messages that outlive the supervisor, each stored behind a digest of it. A damaged one is never given to anybody."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from cluster.supervisor.backend import MessageStore

log = logging.getLogger(__name__)

DIGEST_BYTES: Final = 16
"""128 bits of BLAKE2b over the message."""
MessageT = TypeVar("MessageT", bound=Message)


class StoredMessages(Generic[MessageT]):
    """The stored messages of one kind. Calls raise PeerLost where the store does not answer."""

    def __init__(
        self, store: MessageStore, kind: str, message: type[MessageT], key_of: Callable[[MessageT], str], remedy: str
    ) -> None:
        """`remedy`: what brings a damaged message back."""
        self._store = store
        self._kind = kind
        self._message = message
        self._key_of = key_of
        self._remedy = remedy

    def keep(self, message: MessageT) -> None:
        data = message.SerializeToString()
        self._store.store(self._kind, self._key_of(message), self._digest(data) + data)

    def forget(self, key: str) -> None:
        self._store.store(self._kind, key, None)

    def kept(self) -> dict[str, MessageT]:
        """Returns the messages by their keys. One that is damaged is deleted, with a warning that says so."""
        found: dict[str, MessageT] = {}
        for key, stored in self._store.stored(self._kind).items():
            message = self._unpacked(stored)
            if message is None or self._key_of(message) != key:
                told = f"stored {self._kind} is damaged, it is deleted; {self._remedy} {self._kind}=%s bytes=%d"
                log.warning(told, key, len(stored))
                self.forget(key)
            else:
                found[key] = message
        return found

    def _unpacked(self, stored: bytes) -> MessageT | None:
        digest, data = stored[:DIGEST_BYTES], stored[DIGEST_BYTES:]
        if digest != self._digest(data):
            return None
        try:
            return self._message.FromString(data)
        except DecodeError:
            return None

    def _digest(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=DIGEST_BYTES, person=self._kind.encode()).digest()
