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


@dataclass(slots=True)
class PreparationOutcome:
    value: Any = None
    error: ServeError | None = None
    tokens: int = 0
    """Tokens that were counted, also for a request that was refused."""
    place: str = ""
    """The error was found here in the code."""


class Preparer(Protocol):
    @property
    def text(self) -> Text: ...

    async def prepare(self, work: Work, tenant: str) -> PreparationOutcome:
        """Raises Overloaded where too much waits already."""

    async def compile(self, output: StructuredOutput, tenant: str) -> PreparationOutcome:
        """Returns a CompiledGrammar or a Refusal, or an error. Raises Overloaded where too much waits already."""

    async def run(self) -> None:
        """Serves `prepare` until it is cancelled."""
