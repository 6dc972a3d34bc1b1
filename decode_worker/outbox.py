"""One token stream per router: one message per step carries the news of all of its answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from decode_worker.answer import Answer
from twostroke.fault_points import Point, reach
from twostroke.rpc.v1 import worker_pb2


class Outbox:
    """What one router has been told of its answers, and what it is to be told next.

    A stream that breaks parks its answers: nobody knows what arrived, so they are silent until the router attaches
    them, from the position that it names. `on_abandoned` is called with those that are still parked after `grace_s`,
    and with all of them where no stream has begun by then.
    """

    def __init__(self, grace_s: float, heartbeat_s: float, on_abandoned: Callable[[list[Answer]], None]) -> None:
        self._grace_s = grace_s
        self._heartbeat_s = heartbeat_s
        self._on_abandoned = on_abandoned
        self._positions: dict[Answer, int] = {}
        """The next to be sent, of every answer that is not parked."""
        self._parked: dict[Answer, None] = {}
        self._news: dict[Answer, None] = {}
        """Of these, the answers with something to tell, in the order in which they got it."""
        self._farewells: list[worker_pb2.TokenEntry] = []
        """Last words about attempts that another router has taken over."""
        self._stream: asyncio.Event | None = None
        """Set when there is news for the stream that is connected; a newer stream brings its own."""
        self._grace = self._begin_grace()

    @property
    def is_connected(self) -> bool:
        return self._stream is not None

    def carry(self, answer: Answer, position: int) -> None:
        """From now on, send an answer's tokens from `position` on."""
        self._parked.pop(answer, None)
        self._positions[answer] = position
        if position < answer.end_position or answer.has_ended:
            self.tell(answer)

    def tell(self, answer: Answer) -> None:
        """The answer has grown or ended."""
        if answer in self._positions:
            self._news[answer] = None
            if self._stream is not None:
                self._stream.set()

    def part(self, answer: Answer, farewell: worker_pb2.TokenEntry) -> None:
        """Another router goes on with it. This one is told, unless it does not listen."""
        if answer in self._positions and self._stream is not None:
            self._farewells.append(farewell)
            self._stream.set()
        self.drop(answer)

    def drop(self, answer: Answer) -> None:
        self._parked.pop(answer, None)
        self._positions.pop(answer, None)
        self._news.pop(answer, None)

    async def stream(self) -> AsyncGenerator[worker_pb2.TokenBatch, None]:
        """Batches as they come, an empty one where none has for a heartbeat. A newer stream of the same router ends
        this one."""
        mine = self._begin_stream()
        try:
            yield worker_pb2.TokenBatch()
            while True:
                if not await _is_set_within(mine, self._heartbeat_s):
                    yield worker_pb2.TokenBatch()
                    continue
                if self._stream is not mine:
                    return
                mine.clear()
                reach(Point.DECODE_SENDING)
                entries = [*self._take_farewells(), *(self._entry(answer) for answer in self._take_news())]
                yield worker_pb2.TokenBatch(entries=entries)
        finally:
            if self._stream is mine:
                self._stream = None
                self._park()

    def close(self) -> None:
        self._grace.cancel()

    def _begin_stream(self) -> asyncio.Event:
        older, self._stream = self._stream, asyncio.Event()
        if older is not None:
            self._park()
            older.set()
        elif self._news:
            self._stream.set()
        if not self._parked:
            self._grace.cancel()
        return self._stream

    def _park(self) -> None:
        self._parked.update(dict.fromkeys(self._positions))
        self._positions.clear()
        self._news.clear()
        self._farewells.clear()
        self._grace.cancel()
        self._grace = self._begin_grace()

    def _take_farewells(self) -> list[worker_pb2.TokenEntry]:
        farewells, self._farewells = self._farewells, []
        return farewells

    def _take_news(self) -> list[Answer]:
        answers = list(self._news)
        self._news.clear()
        return answers

    def _entry(self, answer: Answer) -> worker_pb2.TokenEntry:
        entry = answer.entry(self._positions[answer])
        self._positions[answer] = answer.end_position
        return entry

    def _begin_grace(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._grace_s, self._abandon)

    def _abandon(self) -> None:
        unheard = [] if self.is_connected else list(self._positions)
        self._on_abandoned([*self._parked, *unheard])


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False
