"""One token stream per router: one message per step carries the news of all of its answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from decode_worker.answer import Answer
from twostroke.rpc.v1 import worker_pb2


class Outbox:
    """What one router has been told of its answers, and what it is to be told next.

    A stream that breaks parks its answers: nobody knows what arrived, so they are silent until the router attaches
    them, from the position that it names. Where no stream begins within `grace_s`, `on_abandoned` is called.
    """

    def __init__(self, grace_s: float, on_abandoned: Callable[[], None]) -> None:
        self._grace_s = grace_s
        self._on_abandoned = on_abandoned
        self._positions: dict[Answer, int] = {}
        """The next to be sent, of every answer that is not parked."""
        self._news: dict[Answer, None] = {}
        """Of these, the answers with something to tell, in the order in which they got it."""
        self._stream: asyncio.Event | None = None
        """Set when there is news for the stream that is connected; a newer stream brings its own."""
        self._grace = self._begin_grace()

    def carry(self, answer: Answer, position: int) -> None:
        """From now on, send an answer's tokens from `position` on."""
        self._positions[answer] = position
        if position < answer.end_position or answer.has_ended:
            self.tell(answer)

    def tell(self, answer: Answer) -> None:
        """The answer has grown or ended."""
        if answer in self._positions:
            self._news[answer] = None
            if self._stream is not None:
                self._stream.set()

    def drop(self, answer: Answer) -> None:
        self._positions.pop(answer, None)
        self._news.pop(answer, None)

    async def stream(self) -> AsyncGenerator[worker_pb2.TokenBatch, None]:
        """Batches as they come. A newer stream of the same router ends this one."""
        mine = self._begin_stream()
        try:
            yield worker_pb2.TokenBatch()
            while True:
                await mine.wait()
                if self._stream is not mine:
                    return
                mine.clear()
                yield worker_pb2.TokenBatch(entries=[self._entry(answer) for answer in self._take_news()])
        finally:
            if self._stream is mine:
                self._stream = None
                self._park()
                self._grace = self._begin_grace()

    def close(self) -> None:
        self._grace.cancel()

    def _begin_stream(self) -> asyncio.Event:
        self._grace.cancel()
        older, self._stream = self._stream, asyncio.Event()
        if older is not None:
            self._park()
            older.set()
        elif self._news:
            self._stream.set()
        return self._stream

    def _park(self) -> None:
        self._positions.clear()
        self._news.clear()

    def _take_news(self) -> list[Answer]:
        answers = list(self._news)
        self._news.clear()
        return answers

    def _entry(self, answer: Answer) -> worker_pb2.TokenEntry:
        entry = answer.entry(self._positions[answer])
        self._positions[answer] = answer.end_position
        return entry

    def _begin_grace(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._grace_s, self._on_abandoned)
