"""Pins <-> messages."""

from __future__ import annotations

from twostroke.base.ids import PinId
from twostroke.kv_cache.pins.pin_table import Pin
from twostroke.rpc.convert import hashes_from_bytes, hashes_to_bytes, weights_from_message, weights_to_message
from twostroke.rpc.v1 import pins_pb2

MOST_TEXT_CHARS = 80
"""Characters of how a pin begins, for people."""


def pin_to_message(pin: Pin, fingerprint: str, workers: tuple[str, ...] = ()) -> pins_pb2.Pin:
    return pins_pb2.Pin(
        pin_id=pin.pin_id,
        owner=pin.owner,
        tenant=pin.tenant,
        tokens=pin.tokens,
        block_hashes=hashes_to_bytes(pin.block_hashes),
        expires_s=pin.expires_s,
        workers=workers,
        max_bytes=pin.max_bytes,
        text=pin.text,
        fingerprint=fingerprint,
        weights=weights_to_message(pin.weights),
    )


def pin_from_message(message: pins_pb2.Pin) -> Pin:
    """Raises InvalidRequest where the hashes have half a block, or weights have no digest."""
    return Pin(
        pin_id=PinId(message.pin_id),
        owner=message.owner,
        tenant=message.tenant,
        tokens=tuple(message.tokens),
        block_hashes=tuple(hashes_from_bytes(message.block_hashes)),
        expires_s=message.expires_s if message.HasField("expires_s") else None,
        max_bytes=message.max_bytes,
        text=message.text[:MOST_TEXT_CHARS],
        weights=weights_from_message(message.weights) if message.HasField("weights") else None,
    )
