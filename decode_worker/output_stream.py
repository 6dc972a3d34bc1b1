"""One token stream per router: one message per step carries the tokens of all its requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from decode_worker.request_state import RequestState
from twostroke.base.fault_points import Point, reach
from twostroke.rpc.v1 import worker_pb2


@dataclass(slots=True)
class _Sent:
    position: int
    """Position of the next token to be sent."""
    number: int = 0
    """Number of the request on the connected stream; 0 until the stream has had an entry of it."""


class OutputStream:
    """The tokens that were sent to one router for its requests, and those to send next.

    A stream that breaks parks its requests: it is unknown which tokens arrived, so none are sent until the router
    attaches them, from the position that it names. `on_abandoned` is called with those that are still parked after
    `grace_s`, and with all of them where no stream has begun by then.
    """

    def __init__(self, grace_s: float, heartbeat_s: float, on_abandoned: Callable[[list[RequestState]], None]) -> None:
        self._grace_s = grace_s
        self._heartbeat_s = heartbeat_s
        self._on_abandoned = on_abandoned
        self._sent: dict[RequestState, _Sent] = {}
        """Position of each request that is not parked."""
        self._parked: dict[RequestState, None] = {}
        self._updated: dict[RequestState, None] = {}
        """Requests with new tokens or an end to send, in order."""
        self._last_number = 0
        self._detach_notices: list[worker_pb2.TokenEntry] = []
        """Entries about attempts that another router has attached to."""
        self._stream: asyncio.Event | None = None
        """Event of the connected stream, set when there is something to send; a newer stream has its own."""
        self._grace = self._begin_grace()

    @property
    def is_connected(self) -> bool:
        return self._stream is not None

    def carry(self, state: RequestState, position: int) -> None:
        """Sends the tokens of a request from `position` on."""
        self._parked.pop(state, None)
        self._sent[state] = _Sent(position)
        if position < state.end_position or state.has_ended:
            self.notify(state)

    def notify(self, *states: RequestState) -> None:
        """Notes that the requests have new tokens or have ended."""
        self._updated.update(dict.fromkeys([state for state in states if state in self._sent]))
        if self._updated and self._stream is not None:
            self._stream.set()

    def detach(self, state: RequestState, detach_notice: worker_pb2.TokenEntry) -> None:
        """Stops sending a request that another router has attached to, and notifies this router if it is connected."""
        if state in self._sent and self._stream is not None:
            self._detach_notices.append(detach_notice)
            self._stream.set()
        self.drop(state)

    def drop(self, state: RequestState) -> None:
        self._parked.pop(state, None)
        self._sent.pop(state, None)
        self._updated.pop(state, None)

    async def stream(self) -> AsyncGenerator[worker_pb2.TokenBatch, None]:
        """Yields batches, an empty one after `heartbeat_s` without any; a newer stream of the router ends this one."""
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
                yield self._next_batch()
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
        elif self._updated:
            self._stream.set()
        if not self._parked:
            self._grace.cancel()
        return self._stream

    def _park(self) -> None:
        self._parked.update(dict.fromkeys(self._sent))
        self._sent.clear()
        self._updated.clear()
        self._detach_notices.clear()
        self._grace.cancel()
        self._grace = self._begin_grace()

    def _next_batch(self) -> worker_pb2.TokenBatch:
        """Takes all that is to be sent. A request with one more plain token takes one place in each column."""
        entries, self._detach_notices = self._detach_notices, []
        numbers: list[int] = []
        positions: list[int] = []
        tokens: list[int] = []
        updated, self._updated = self._updated, {}
        for state in updated:
            sent, end = self._sent[state], state.end_position
            position, sent.position = sent.position, end
            if sent.number and end - position == 1 and not state.has_ended and state.tokens[-1].logprob is None:
                numbers.append(sent.number)
                positions.append(position)
                tokens.append(state.tokens[-1].token)
                continue
            if not sent.number:
                self._last_number += 1
                sent.number = self._last_number
            entries.append(state.entry(position, sent.number))
        return worker_pb2.TokenBatch(entries=entries, numbers=numbers, positions=positions, tokens=tokens)

    def _begin_grace(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._grace_s, self._abandon)

    def _abandon(self) -> None:
        unsent = [] if self.is_connected else list(self._sent)
        self._on_abandoned([*self._parked, *unsent])


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False
