"""The slot of a client: one planned request in, one Answer of clock readings out."""

from __future__ import annotations

import abc
from array import array
from collections.abc import Awaitable, Callable

from tools.bench.load import PlannedRequest
from tools.bench.measure import Answer, Failure

Clock = Callable[[], float]
"""Monotonic seconds."""
Send = Callable[[], Awaitable[Answer]]
"""A request whose bytes are ready: nothing but sending is left when it is due."""


class Client(abc.ABC):
    """Failures of the world become an Answer with a Failure; `Send` raises only for bugs and cancellation."""

    @abc.abstractmethod
    def prepare(self, planned: PlannedRequest) -> Send: ...

    @abc.abstractmethod
    async def close(self) -> None: ...


class Recorder:
    """Collects one answer. Created when the request is sent."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sent_at_s = clock()
        self._event_times_s = array("d")
        self._event_tokens = 0
        self._ids_seen = False
        self._completion_tokens: int | None = None
        self._prompt_tokens: int | None = None
        self._cached_tokens: int | None = None

    def token_event(self, at_s: float, id_count: int | None) -> None:
        """An event with tokens arrived; `id_count` where it says how many."""
        self._event_times_s.append(at_s)
        self._event_tokens += 1 if id_count is None else id_count
        self._ids_seen = self._ids_seen or id_count is not None

    def usage(self, prompt_tokens: int | None, completion_tokens: int | None, cached_tokens: int | None) -> None:
        self._prompt_tokens = prompt_tokens
        self._completion_tokens = completion_tokens
        self._cached_tokens = cached_tokens

    def completed(self) -> Answer:
        """An answer without any token is a failure: nothing about it could be measured."""
        if self._output_tokens == 0:
            return self.failed("no tokens", "the answer ended without reporting a token")
        return self._answer(None)

    def failed(self, kind: str, message: str) -> Answer:
        return self._answer(Failure(kind, message))

    @property
    def _output_tokens(self) -> int:
        return self._event_tokens if self._completion_tokens is None else self._completion_tokens

    def _answer(self, failure: Failure | None) -> Answer:
        counted_by = "ids" if self._ids_seen else "events"
        return Answer(
            sent_at_s=self._sent_at_s,
            ended_at_s=self._clock(),
            event_times_s=self._event_times_s,
            output_tokens=self._output_tokens,
            counted_by=counted_by if self._completion_tokens is None else "usage",
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            failure=failure,
        )
