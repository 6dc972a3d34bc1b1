"""Reads references of JSON schemas. Pure."""

from __future__ import annotations

import re
from typing import Any


def is_named(reference: Any) -> bool:
    """Tells whether a reference names an id, an anchor or another document, and no place in its own."""
    return isinstance(reference, str) and reference != "#" and not reference.startswith("#/")


def schema_at(root: Any, reference: Any) -> Any:
    """Returns what a reference within the document leads to.

    None where it leads nowhere, which llguidance refuses, and where it names an id or an anchor.
    """
    if not isinstance(reference, str) or is_named(reference):
        return None
    value = root
    for part in reference.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict):
            value = value.get(name)
        elif isinstance(value, list) and (index := _INDEX.fullmatch(name)) and int(index[1]) < len(value):
            value = value[int(index[1])]
        else:
            return None
    return value


_INDEX = re.compile(r"\+?0*([0-9]{1,9})")
"""A place in a list, as llguidance reads it. Python refuses to read numbers of thousands of digits."""
