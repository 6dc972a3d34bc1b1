"""What the text of an answer must match, as a client wrote it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from twostroke.base.errors import InvalidRequest
from twostroke.request import MAX_GRAMMAR_CHARS


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """Raises InvalidRequest, naming the field, for a text that is too long."""

    kind: str
    """A key of `router.text.structured.sources.SOURCES`."""
    body: bytes
    """The text that describes the output, in UTF-8: a schema, a regex, a grammar, or a JSON list of choices."""
    field: str
    """The client's field, for errors."""
    is_strict: bool = False
    """Whether formats that cannot be kept to are refused, instead of being taken as notes."""
    has_whitespace: bool = True
    """Whether JSON may have whitespace between its parts."""
    is_open: bool = False
    """Whether objects may have properties that their schema does not name, unless it forbids them."""
    otherwise: StructuredOutput | None = None
    """What is kept to instead where this cannot be: a wish of the client's that is not a promise."""

    def __post_init__(self) -> None:
        if len(self.body) > MAX_GRAMMAR_CHARS:
            raise InvalidRequest(
                f"{self.field} must have at most {MAX_GRAMMAR_CHARS} bytes, got {len(self.body)}", field=self.field
            )

    @property
    def digest(self) -> bytes:
        """Digest of all that the grammar, or the error, depends on: 16 bytes."""
        flags = f"{self.kind} {self.field} {self.is_strict} {self.has_whitespace} {self.is_open}\n".encode()
        return hashlib.blake2b(flags + self.body, digest_size=16, person=b"structured").digest()
