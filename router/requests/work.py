"""What reads and prepares a request before it is admitted, as the request handler sees it: its work, and what it made.

`router.preparation` does the work, in processes of its own where it may take long.
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
    """What a request says beside its body."""

    path_fields: tuple[tuple[str, str], ...] = ()
    json_bytes: int | None = None
    tenant: str | None = ""
    """The one that a gateway names, where no API key does. None: it is not known yet, and no text is kept."""


NOTHING_BESIDE = BesideBody()


@dataclass(frozen=True, slots=True)
class Work:
    """One request as it came, and what is served."""

    kind: str
    """A key of `router.preparation.prepare.KINDS`, or the path of a dialect."""
    body: bytes
    model: str
    facts: ServingFacts
    named_models: frozenset[str] = frozenset()
    """Names of models that are served beside it."""
    path_fields: tuple[tuple[str, str], ...] = ()
    """Fields of the body that the path of an HTTP request says."""
    formats: OutputFormats = NO_FORMATS
    """How the model writes calls and reasoning."""
    json_bytes: int | None = None
    """Bytes of the body that are JSON, where others follow. None: all are."""
    tenant: str | None = None
    """The tenant who may find the prompt's text again, which is empty for requests without one. None: by nobody."""
    text_key: bytes = b""
    """Key of that tenant's text. Empty: nothing is known of it, and nothing kept."""


@dataclass(frozen=True, slots=True)
class SegmentQuery:
    """What a process that prepares a request asks its router for meanwhile: how many of these are known."""

    keys: bytes
    """One key after the other, of `KEY_BYTES` each."""


@dataclass(frozen=True, slots=True)
class Segments:
    """Tokens of segments of text, one segment after the other."""

    keys: bytes
    """Empty in the answer to a query, whose keys are known."""
    counts: tuple[int, ...]
    """Tokens of each segment."""
    tokens: bytes
    """Tokens of all segments as an array of 32-bit numbers has them."""


@dataclass(slots=True)
class PreparationOutcome:
    value: Any = None
    error: ServeError | None = None
    tokens: int = 0
    """Tokens that were counted, also for a request that was refused."""
    place: str = ""
    """The error was found here in the code."""
    learned: Segments | None = None
    """Segments of its text that were not known."""


class Preparer(Protocol):
    @property
    def text(self) -> Text: ...

    async def prepare(self, work: Work, tenant: str) -> PreparationOutcome:
        """Raises Overloaded where too much waits already."""

    async def compile(self, output: StructuredOutput, tenant: str) -> PreparationOutcome:
        """Returns a CompiledGrammar or a Refusal, or an error. Raises Overloaded where too much waits already."""

    async def run(self) -> None:
        """Serves `prepare` until it is cancelled."""
