"""The form in which the supervisor stores a pin: its message behind a digest of it.

A pin says which tokens its blocks have, and a worker that holds it computes these blocks. A damaged pin is never given
to anybody: its blocks would lie under hashes of other tokens.
"""

from __future__ import annotations

import hashlib
import logging
from typing import Final

from google.protobuf.message import DecodeError

from cluster.supervisor.backend import MessageStore
from twostroke.rpc.v1 import pins_pb2

log = logging.getLogger(__name__)

DIGEST_BYTES: Final = 16
"""128 bits of BLAKE2b over the message."""
KIND: Final = "pin"
"""Kind of the stored messages."""


def keep(store: MessageStore, pin: pins_pb2.Pin) -> None:
    """Stores a pin. Raises PeerLost."""
    message = pin.SerializeToString()
    store.store(KIND, pin.pin_id, _digest(message) + message)


def kept(store: MessageStore) -> dict[str, pins_pb2.Pin]:
    """Returns the stored pins by their ids. One that is damaged is deleted, with a warning that says so."""
    pins: dict[str, pins_pb2.Pin] = {}
    for pin_id, stored in store.stored(KIND).items():
        pin = _unpacked(stored)
        if pin is None or pin.pin_id != pin_id:
            log.warning(
                "stored pin is damaged, it is deleted; `twostroke pin add` with the same prefix brings it back "
                "pin=%s bytes=%d", pin_id, len(stored),
            )  # fmt: skip
            store.store(KIND, pin_id, None)
            continue
        pins[pin_id] = pin
    return pins


def _unpacked(stored: bytes) -> pins_pb2.Pin | None:
    digest, message = stored[:DIGEST_BYTES], stored[DIGEST_BYTES:]
    if digest != _digest(message):
        return None
    try:
        return pins_pb2.Pin.FromString(message)
    except DecodeError:
        return None


def _digest(message: bytes) -> bytes:
    return hashlib.blake2b(message, digest_size=DIGEST_BYTES, person=b"twostroke.pin").digest()
