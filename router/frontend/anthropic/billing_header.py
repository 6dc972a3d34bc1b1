"""The billing header that Claude Code puts in front of its system prompt.

Its value changes with every request, so that no two prompts would have a block in common. It says nothing to a model.
"""

from __future__ import annotations

import re

_HEADERS = re.compile(r"(?:x-anthropic-billing-header:[^\n]*(?:\n|\Z))+")


def without_billing_header(text: str) -> str:
    """Returns a system text without the header's lines. Only lines at its beginning are taken for the header."""
    header = _HEADERS.match(text)
    return text[header.end() :] if header else text
