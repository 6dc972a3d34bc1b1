"""What the text of an answer must match, as a client wrote it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from twostroke.base.errors import InvalidRequest
from twostroke.request import MAX_GRAMMAR_CHARS


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """What an answer must match. A text that is too long raises InvalidRequest, naming the field."""

    kind: str
    """A key of `router.text.structured.sources.SOURCES`."""
    body: bytes
    """The text that describes the output, in UTF-8: a schema, a regex, a grammar, or a JSON list of choices."""
    field: str
    """The client's field, for errors."""
    is_strict: bool = False
    """Whether a `format` of strings that is not supported is refused, instead of ignored."""
    has_whitespace: bool = True
    """Whether JSON may have whitespace between its parts."""
    is_open: bool = False
    """Whether objects may have properties that their schema does not name, unless it forbids them."""
    otherwise: StructuredOutput | None = None
    """The output that is used instead if this one is refused. None: a refusal is an error."""

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
