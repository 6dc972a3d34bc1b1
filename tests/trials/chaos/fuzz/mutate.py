"""Changes to valid input. All draw from the generator they are given, so that a seed tells the whole run."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from typing import Any

import msgpack
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

MAX_BYTES = 1 << 16
INTEGERS = (0, 1, -1, 2, 3, 15, 16, 127, 128, 255, 256, 4096, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32,
            2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63))  # fmt: skip
FLOATS = (0.0, -0.0, 0.5, 1.0, -1.0, 1e-300, 1e300, 5e-324, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "",
    "0",
    "-1",
    "1.",
    ".1",
    "1.0",
    "a" * 300,
    "\0",
    "é\u202e",
    "1" * 5000,
    "null",
    "{}",
    "%s",
    "../..",
    "secret",
)


def mutate_bytes(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4, 16))):
        at = draw.randrange(len(changed) + 1)
        match draw.randrange(7):
            case 0 if at < len(changed):
                changed[at] ^= 1 << draw.randrange(8)
            case 1 if at < len(changed):
                changed[at] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
            case 2:
                changed[at:at] = draw.randbytes(draw.choice((1, 2, 4, 8, 64)))
            case 3:
                del changed[at : at + draw.choice((1, 2, 4, 8, 64))]
            case 4:
                changed[at:at] = changed[at : at + draw.choice((1, 4, 16, 256))]
            case 5:
                number = draw.choice(INTEGERS) & (2**64 - 1)
                changed[at : at + 8] = struct.pack(draw.choice(("<Q", "!Q")), number)[: draw.choice((1, 2, 4, 8))]
            case _ if draw.randrange(4) == 0:
                del changed[at:]
    return bytes(changed[:MAX_BYTES])


def mutate_tree(value: Any, draw: random.Random, *, with_bytes: bool) -> Any:
    """One place of a tree of lists, dicts and scalars is different; the tree is rebuilt, not changed."""
    if isinstance(value, list) and value and draw.randrange(6):
        at = draw.randrange(len(value))
        return [*value[:at], mutate_tree(value[at], draw, with_bytes=with_bytes), *value[at + 1 :]]
    if isinstance(value, dict) and value and draw.randrange(6):
        key = draw.choice(list(value))
        return {**value, key: mutate_tree(value[key], draw, with_bytes=with_bytes)}
    if isinstance(value, list) and draw.randrange(3):
        at = draw.randrange(len(value) + 1)
        return draw.choice(
            (value[:at], value[at:], value * 2, [*value[:at], any_scalar(draw, with_bytes), *value[at:]])
        )
    if isinstance(value, dict) and draw.randrange(3):
        return {**value, str(any_scalar(draw, with_bytes=False)): any_scalar(draw, with_bytes)}
    if isinstance(value, bytes) and draw.randrange(4):
        return mutate_bytes(value, draw)
    if isinstance(value, str) and draw.randrange(4):
        return mutate_bytes(value.encode(errors="surrogatepass"), draw).decode(errors="replace")
    if isinstance(value, int | float) and not isinstance(value, bool) and draw.randrange(3):
        return draw.choice((-value, value + 1, value - 1, value * 2, float(value) if abs(value) < 2**60 else 0))
    return draw.choice((any_scalar(draw, with_bytes), [value], {"a": value}, [any_scalar(draw, with_bytes)] * 40))


def any_scalar(draw: random.Random, with_bytes: bool) -> Any:
    kinds: list[Any] = [None, True, False, draw.choice(INTEGERS), draw.choice(FLOATS), draw.choice(TEXTS), [], {}]
    return draw.choice([*kinds, draw.randbytes(draw.choice((0, 1, 4, 8, 12)))] if with_bytes else kinds)


def mutate_json(data: bytes, draw: random.Random) -> bytes:
    if draw.randrange(5):
        try:
            return json.dumps(mutate_tree(json.loads(data), draw, with_bytes=False)).encode()[:MAX_BYTES]
        except (ValueError, RecursionError):
            pass
    return mutate_bytes(data, draw)


def mutate_msgpack(data: bytes, draw: random.Random) -> bytes:
    if draw.randrange(4):
        try:
            return bytes(msgpack.packb(mutate_tree(msgpack.unpackb(data), draw, with_bytes=True)))[:MAX_BYTES]
        except (ValueError, TypeError, OverflowError, msgpack.UnpackException):
            pass
    return mutate_bytes(data, draw)


def frame(fields: Any) -> bytes:
    body = msgpack.packb(fields)
    return struct.pack("!I", len(body)) + bytes(body)


def mutate_frames(data: bytes, draw: random.Random) -> bytes:
    """Length-prefixed frames of msgpack, one after the other."""
    if not draw.randrange(4):
        return mutate_bytes(data, draw)
    frames = _frames(data)
    if not frames:
        return mutate_bytes(data, draw)
    at = draw.randrange(len(frames))
    match draw.randrange(6):
        case 0:
            frames = [*frames[:at], frames[draw.randrange(len(frames))], *frames[at:]]
        case 1:
            frames = frames[:at] + frames[at + 1 :]
        case _:
            body = mutate_msgpack(frames[at][4:], draw)
            frames[at] = struct.pack("!I", len(body)) + body
    return b"".join(frames)[:MAX_BYTES]


def _frames(data: bytes) -> list[bytes]:
    frames = []
    while len(data) >= 4:
        (length,) = struct.unpack_from("!I", data)
        frames.append(data[: 4 + length])
        data = data[4 + length :]
    return frames


def mutate_message(kind: type[Message]) -> Callable[[bytes, random.Random], bytes]:
    """Returns a mutation of one protobuf message; a field of it, or of one within it, is different."""

    def mutate(data: bytes, draw: random.Random) -> bytes:
        if not draw.randrange(5):
            return mutate_bytes(data, draw)
        message = kind()
        try:
            message.ParseFromString(data)
        except DecodeError:
            return mutate_bytes(data, draw)
        for _ in range(draw.choice((1, 1, 2, 3))):
            _change_field(message, draw)
        return message.SerializeToString()[:MAX_BYTES]

    return mutate


def _change_field(message: Message, draw: random.Random) -> None:
    fields = message.DESCRIPTOR.fields
    if not fields:
        return
    field = draw.choice(fields)
    if not draw.randrange(8) or (field.message_type is not None and field.message_type.GetOptions().map_entry):
        message.ClearField(field.name)
    elif field.message_type is not None:
        values = getattr(message, field.name)
        if field.is_repeated:
            values = draw.choice(values) if len(values) and draw.randrange(3) else values.add()
        else:
            values.SetInParent()
        _change_field(values, draw)
    elif field.is_repeated:
        values = getattr(message, field.name)
        kept = list(values)
        at = draw.randrange(len(kept) + 1)
        value = _value_of(field, kept[at] if at < len(kept) else None, draw)
        values[:] = draw.choice((kept[:at], kept[at:], [*kept[:at], value, *kept[at + 1 :]], [value] * 70))
    else:
        setattr(message, field.name, _value_of(field, getattr(message, field.name), draw))


def _value_of(field: FieldDescriptor, now: Any, draw: random.Random) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return mutate_bytes(now or b"", draw)
        case FieldDescriptor.CPPTYPE_STRING:
            return draw.choice((draw.choice(TEXTS), mutate_bytes((now or "").encode(), draw).decode(errors="replace")))
        case FieldDescriptor.CPPTYPE_BOOL:
            return draw.randrange(2) == 1
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return draw.choice(FLOATS)
        case FieldDescriptor.CPPTYPE_INT32 | FieldDescriptor.CPPTYPE_ENUM:
            return draw.choice([n for n in INTEGERS if -(2**31) <= n < 2**31])
        case FieldDescriptor.CPPTYPE_UINT32:
            near = [now + 1, now - 1, now * 2] if now else []
            return draw.choice([n for n in (*INTEGERS, *near) if 0 <= n < 2**32])
        case FieldDescriptor.CPPTYPE_UINT64:
            return draw.choice([n for n in INTEGERS if 0 <= n < 2**64])
    return draw.choice([n for n in INTEGERS if -(2**63) <= n < 2**63])
