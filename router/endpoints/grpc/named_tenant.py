"""Reads the tenant from a serialized message without parsing it: parsing a large one takes long."""

from __future__ import annotations

from typing import Final

from twostroke.rpc.v1 import inference_pb2

FIELD: Final = inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name["tenant"].number
MOST_FIELDS = 500
"""Most fields of a message that are read; a prompt is one field. With more, the tenant is not known."""
FIXED_BYTES: Final = {1: 8, 5: 4}
"""Bytes of a value, by the wire types that have a fixed length."""


def named_tenant(raw: bytes) -> str | None:
    """Returns the tenant that a message of `Generate` names, or "". None: the message has too many fields, or is
    malformed.
    """
    at, tenant = 0, b""
    try:
        for _ in range(MOST_FIELDS):
            if at >= len(raw):
                return tenant.decode() if at == len(raw) else None
            tag, at = _number(raw, at)
            wire_type = tag & 7
            if wire_type == 0:
                _, at = _number(raw, at)
            elif wire_type == 2:
                length, at = _number(raw, at)
                if tag >> 3 == FIELD:
                    tenant = raw[at : at + length]
                at += length
            else:
                at += FIXED_BYTES[wire_type]
    except (IndexError, KeyError, UnicodeDecodeError):
        pass
    return None


def _number(raw: bytes, at: int) -> tuple[int, int]:
    """Returns the varint at `at`, and where it ends. Raises IndexError for bytes that are no varint."""
    value = 0
    for index in range(10):
        byte = raw[at + index]
        value |= (byte & 127) << 7 * index
        if byte < 128:
            return value, at + index + 1
    raise IndexError("a number is too long")
