"""Tensors as the bytes that Triton's clients send them in, over gRPC and behind the JSON of HTTP alike.

Numbers are little endian, a text stands behind its length in four bytes, and a boolean is one byte
(https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from router.dialects.kserve.answer_parts import Values
from twostroke.base.errors import InvalidRequest

_LENGTH = struct.Struct("<I")


def raw_bool(name: str, raw: bytes) -> bool:
    """Returns the one value of an input. Raises InvalidRequest that names it."""
    if raw not in (b"\x00", b"\x01"):
        raise InvalidRequest(f"input {name} must be one BOOL: a byte, 0 or 1", field=name)
    return raw == b"\x01"


def raw_text(name: str, raw: bytes) -> str:
    """Returns the one value of an input. Raises InvalidRequest that names it."""
    if len(raw) < _LENGTH.size or _LENGTH.unpack_from(raw)[0] != len(raw) - _LENGTH.size:
        needed = "must be one string behind its length, four bytes of little endian"
        raise InvalidRequest(f"input {name} {needed}", field=name)
    return decoded_text(name, raw[_LENGTH.size :])


def decoded_text(name: str, text: bytes) -> str:
    """Raises InvalidRequest, naming the input, for what is not UTF-8."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        what = f"{error.reason} at byte {error.start}"
        raise InvalidRequest(f"input {name} is not valid UTF-8: {what}", field=name) from error


def raw_output(datatype: str, values: Values) -> bytes:
    if datatype == "BYTES":
        return b"".join(_LENGTH.pack(len(text)) + text for text in encoded_texts(values))
    return struct.pack(f"<{len(values)}{'f' if datatype == 'FP32' else 'I'}", *values)


def encoded_texts(values: Values) -> Iterable[bytes]:
    return (str(value).encode(errors="replace") for value in values)
