"""Virtual time: what happens when, in order; equal times in the order in which they were entered.

`VirtualLoop` is asyncio's interface to it: code of the live workers runs on it unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import math
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextvars import Context
from dataclasses import dataclass
from typing import Any, TypeVar

from twostroke.base.errors import InternalError

MOST_AT_ONCE = 1_000_000
"""Actions at one instant: more are one that calls itself again without time passing."""

TIMER_S = 1e-9
"""Seconds by which a timer is late, as a clock's resolution makes live ones: sums of times are rounded, and time has to
pass."""

Action = Callable[[], None]
Result = TypeVar("Result")


@dataclass(slots=True, eq=False)
class QueuedEvent:
    """Cancelled by taking its action away."""

    action: Action | None

    def cancel(self) -> None:
        self.action = None


class EventQueue:
    def __init__(self) -> None:
        self.now_s = 0.0
        self._entries: list[tuple[float, int, QueuedEvent]] = []
        self._numbers = itertools.count()
        self._is_over = False

    def at(self, when_s: float, action: Action) -> QueuedEvent:
        """Queues an event for a time, which is not before now."""
        entry = QueuedEvent(action)
        heapq.heappush(self._entries, (max(when_s, self.now_s), next(self._numbers), entry))
        return entry

    def after(self, delay_s: float, action: Action) -> QueuedEvent:
        return self.at(self.now_s + delay_s, action)

    def stop(self) -> None:
        """Stops the queue: no further event happens."""
        self._is_over = True

    def run(self) -> None:
        """Runs until stopped. Raises InternalError where nothing is left to happen before, or time stands still."""
        entries, at_once = self._entries, 0
        while not self._is_over:
            if not entries:
                raise InternalError(f"the simulation stands still at {self.now_s:.3f} s with requests open")
            when_s, _, entry = heapq.heappop(entries)
            if entry.action is None:
                continue
            at_once = at_once + 1 if when_s == self.now_s else 0
            if at_once > MOST_AT_ONCE:
                raise InternalError(f"the simulation does not get past {when_s:.6f} s")
            self.now_s = when_s
            entry.action()


class VirtualLoop(asyncio.AbstractEventLoop):
    """An event loop in virtual time. It has what timers, futures and tasks need, and nothing else."""

    def __init__(self, queue: EventQueue) -> None:
        self._queue = queue

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Makes it the running loop of this thread."""
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            yield
        finally:
            asyncio._set_running_loop(outer)

    def time(self) -> float:
        return self._queue.now_s

    def get_debug(self) -> bool:
        return False

    def call_soon(
        self, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self._call_at(self._queue.now_s, callback, args, context)

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Calls a function soon. Everything simulated runs on one thread."""
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._queue.now_s + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self._call_at(when + max(TIMER_S, 4 * math.ulp(when)), callback, args, context)

    def _call_at(
        self, when: float, callback: Callable[..., object], args: tuple[object, ...], context: Context | None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)

        def act() -> None:
            if not handle.cancelled():
                handle._run()

        self._queue.at(when, act)
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Generator[Any, None, Result] | Coroutine[Any, Any, Result],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[Result]:
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Ends the run: what a callback raises is a mistake."""
        error = context.get("exception")
        if error is not None:
            raise error

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Does nothing: cancelled timers stay in the queue and do nothing."""
