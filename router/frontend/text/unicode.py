"""Text that a client sent, checked: JSON can smuggle in half surrogates, which no tokenizer and no answer takes."""

from __future__ import annotations

from twostroke.errors import InvalidRequest


def checked_utf8(value: str, field: str) -> str:
    """Raises InvalidRequest that names the field."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{field} is not valid Unicode text: {error}", field=field) from error
    return value
