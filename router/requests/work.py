"""How the request handler has requests prepared before they are admitted: `Preparer` turns `Work` into an outcome.

`router.preparation` implements it, with processes of its own for work that may take long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from router.fleet.worker import ServingFacts
from router.text.output.parsing import NO_FORMATS, OutputFormats
from router.text.structured.output import StructuredOutput
from router.text.tokenizer import Text
from twostroke.base.errors import ServeError


@dataclass(frozen=True, slots=True)
class BesideBody:
    """What is known of a request besides its body, from its path, its headers or its message."""

    path_fields: tuple[tuple[str, str], ...] = ()
    json_bytes: int | None = None
    tenant: str | None = ""
    """The tenant that a gateway names, for requests whose API key names none. None: it is not known yet, so no text of
    the request is kept."""


NOTHING_BESIDE = BesideBody()


@dataclass(frozen=True, slots=True)
class Work:
    """One request as it arrived, and the model that is served."""

    kind: str
    """A key of `router.preparation.prepare.KINDS`, or the path of a dialect."""
    body: bytes
    model: str
    facts: ServingFacts
    named_models: frozenset[str] = frozenset()
    """Names of models that are served beside it."""
    path_fields: tuple[tuple[str, str], ...] = ()
    """Names and values of fields that the path of an HTTP request adds to its body."""
    formats: OutputFormats = NO_FORMATS
    """How the model writes calls and reasoning."""
    json_bytes: int | None = None
    """Length of the JSON at the beginning of the body, in bytes. None: all of the body is JSON."""
    tenant: str | None = None
    """Tenant whose later requests may reuse the tokens of the prompt; "" are requests without one. None: none may."""
    text_key: bytes = b""
    """Key of the tenant's known text. Empty: tokens are neither reused nor kept."""


@dataclass(frozen=True, slots=True)
class SegmentQuery:
    """Asks the router, during preparation in another process, for the tokens of segments of text."""

    keys: bytes
    """Keys of the segments, one after the other, of `KEY_BYTES` each."""


@dataclass(frozen=True, slots=True)
class Segments:
    """Tokens of segments of text, one segment after the other."""

    keys: bytes
    """Keys of the segments. Empty in the answer to a query, which has them."""
    counts: tuple[int, ...]
    """Number of tokens of each segment."""
    tokens: bytes
    """Tokens of all segments, as the bytes of an array of 32-bit integers."""


@dataclass(slots=True)
class PreparationOutcome:
    value: Any = None
    error: ServeError | None = None
    tokens: int = 0
    """Tokens that were counted, also for a request that was refused."""
    place: str = ""
    """Place in the code where the error was raised."""
    learned: Segments | None = None
    """Segments of the request's text whose tokens the router did not know."""


class Preparer(Protocol):
    @property
    def text(self) -> Text: ...

    async def prepare(self, work: Work, tenant: str) -> PreparationOutcome:
        """Returns what the work's kind makes of the request, or an error. Raises Overloaded if too much waits."""

    async def compile(self, output: StructuredOutput, tenant: str) -> PreparationOutcome:
        """Returns a CompiledGrammar or a Refusal, or an error. Raises Overloaded if too much waits."""

    async def run(self) -> None:
        """Serves `prepare` until it is cancelled."""
