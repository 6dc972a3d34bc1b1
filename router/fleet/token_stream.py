"""Tokens of one attempt as they arrive from a decode worker: in order, never a gap, never a duplicate."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from twostroke.errors import ServeError
from twostroke.ids import RequestId
from twostroke.request import FinishReason, SampledToken
from twostroke.rpc.convert import error_from_message, token_from_message
from twostroke.rpc.v1.worker_pb2 import TokenEntry


@dataclass(frozen=True, slots=True)
class Arrival:
    """What one entry added."""

    tokens: tuple[SampledToken, ...]
    finish: FinishReason | None
    cached_tokens: int
    """Prompt tokens that were not computed for this attempt; told with its first entry."""
    lifetime: dict[str, float]


class AnswerStream:
    """The link feeds it, the answer reads it; it ends with a finish reason or an error."""

    def __init__(self, request_id: RequestId, attempt: int, next_position: int) -> None:
        self.request_id = request_id
        self.attempt = attempt
        self.next_position = next_position
        """Of the first token that has not arrived."""
        self.is_complete = False
        """The worker has said its last word: nothing to close there."""
        self._arrivals: deque[Arrival] = deque()
        self._error: ServeError | None = None
        self._news = asyncio.Event()

    def feed(self, entry: TokenEntry) -> bool:
        """Take an entry; False where tokens before it are missing (nothing is taken then)."""
        if self.is_complete or self._error is not None:
            return True
        if entry.finish_reason == FinishReason.ERROR:
            self.end(error_from_message(entry.error))
            return True
        if entry.position > self.next_position:
            return False
        fresh = entry.tokens[self.next_position - entry.position :]
        finish = FinishReason(entry.finish_reason) if entry.finish_reason else None
        if not fresh and finish is None:
            return True
        self.next_position += len(fresh)
        self.is_complete = finish is not None
        self._arrivals.append(
            Arrival(
                tuple(token_from_message(token) for token in fresh),
                finish,
                entry.cached_tokens,
                dict(entry.lifetime),
            )
        )
        self._news.set()
        return True

    def end(self, error: ServeError) -> None:
        """The worker has said its last word: an error."""
        self.is_complete = True
        self.fail(error)

    def fail(self, error: ServeError) -> None:
        """No more will come; what has arrived is still read first."""
        self._error = self._error or error
        self._news.set()

    async def next(self) -> Arrival:
        """What has arrived; nothing follows the one with a finish reason. Raises the error that ended the stream."""
        while not self._arrivals:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        return self._arrivals.popleft()
