"""Reads event streams whose events have a name: `event: NAME`, `data: JSON`, and a blank line."""

from __future__ import annotations

import json
from typing import Any

Json = dict[str, Any]


def named_events_of(stream: str) -> list[tuple[str, Json]]:
    """Returns the events of a whole stream. Raises AssertionError for whatever else is in it."""
    *events, rest = stream.split("\n\n")
    assert not rest, f"the stream ends in the middle of {rest!r}"
    return [_read(event) for event in events]


def _read(event: str) -> tuple[str, Json]:
    name, _, data = event.partition("\n")
    assert name.startswith("event: "), f"not a name: {event!r}"
    assert data.startswith("data: "), f"not a data line: {event!r}"
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))
