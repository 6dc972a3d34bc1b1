"""Interfaces for features that decide which sampled tokens become known, and for those that propose tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from twostroke.request import SampledToken


class Reading(Protocol):
    """The work of finding out which of the drawn tokens become known. It may take longer than a step."""

    @property
    def tokens(self) -> Sequence[SampledToken]:
        """The tokens that become known."""

    @property
    def failed(self) -> SampledToken | None:
        """The token, if any, at which the answer has failed."""

    @property
    def is_done(self) -> bool:
        """Whether the work is done. Until then the next reading of the answer does not start."""

    @property
    def is_slow(self) -> bool:
        """Whether it is slow and has to run separately from the others."""

    @property
    def latest_s(self) -> float:
        """Processor time of the previous reading of the answer, in seconds."""

    def run(self) -> None:
        """Runs on any thread; it never raises."""


class TokenReader(Protocol):
    """Decides which tokens of one answer become known. Only these end it, even if the request ignores end tokens."""

    def reading(
        self, drawn: Sequence[SampledToken], proposed: Sequence[int], most_tokens: int, ends: Collection[int]
    ) -> Reading:
        """Returns the work for the tokens that were drawn after the last known one, and after each of `proposed`.

        At most `most_tokens` become known; those of `ends` end the answer.
        """


class ReadingRunner(Protocol):
    def run(self, readings: Sequence[Reading]) -> None:
        """Starts all readings. It returns when they are done, or after a short time. Then some finish later."""


class InlineReadings:
    """Runs all readings at once, on the caller's thread."""

    def run(self, readings: Sequence[Reading]) -> None:
        for reading in readings:
            reading.run()


class Proposer(Protocol):
    """Proposes tokens that may come next in one answer, and learns what came."""

    def drawn(self, tokens: Sequence[int], run: int) -> None:
        """Learns from the tokens that became known in a step that ran the first `run` proposed ones."""
