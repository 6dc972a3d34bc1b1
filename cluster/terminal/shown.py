"""What commands print of the messages that they get: plain values for programs, tables for people."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection
from typing import Any

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message
from rich import box
from rich.console import Console
from rich.table import Table

PIPE_COLUMNS = 200
"""Width of tables that no terminal shows."""


def values_of(message: Message) -> dict[str, Any]:
    """Returns the fields of a message by name, as JSON takes them. None stands for what is not set or not finite."""
    return {field.name: _value(message, field) for field in message.DESCRIPTOR.fields}


def word_of(enum: EnumDescriptor, number: int) -> str:
    """Returns the name of an enum's value in lower case and without the enum's own name."""
    prefix = "".join(f"_{each}" if each.isupper() else each for each in enum.name).lstrip("_").lower()
    return enum.values_by_number[number].name.lower().removeprefix(f"{prefix}_")


def _value(message: Message, field: Any) -> Any:
    if field.has_presence and not message.HasField(field.name):
        return None
    value = getattr(message, field.name)
    return [_plain(field, each) for each in value] if field.is_repeated else _plain(field, value)


def _plain(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return values_of(value)
    if field.enum_type is not None:
        return word_of(field.enum_type, value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value.hex() if isinstance(value, bytes) else value


def table(*headings: str, numbers: Collection[str] = (), folded: Collection[str] = ()) -> Table:
    """Returns an empty table. Cells of `folded` columns take several lines where the room is small."""
    made = Table(box=box.SIMPLE_HEAD)
    for heading in headings:
        is_folded = heading in folded
        made.add_column(
            heading,
            justify="right" if heading in numbers else "left",
            no_wrap=not is_folded,
            overflow="fold" if is_folded else "ellipsis",
        )
    return made


def print_table(made: Table, otherwise: str = "") -> None:
    """Prints a table, or what is to be said where it has no rows."""
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS)
    console.print(made if made.row_count or not otherwise else otherwise)
