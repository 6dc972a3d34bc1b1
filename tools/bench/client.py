"""The slot of a client: one planned request in, one Answer of clock readings out."""

from __future__ import annotations

import abc
import asyncio
import gc
import time
from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from tools.bench.load import PlannedRequest
from tools.bench.measure import Answer, Failure, Record

Clock = Callable[[], float]
"""Monotonic seconds."""
Send = Callable[[], Awaitable[Answer]]
"""A request with its bytes ready to send: nothing but sending is left when it is due."""


class Client(abc.ABC):
    """Failures of the world become an Answer with a Failure; `Send` raises only for bugs and cancellation."""

    @abc.abstractmethod
    def prepare(self, planned: PlannedRequest) -> Send: ...

    @abc.abstractmethod
    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ReportedUsage:
    """What a server says about an answer; None where it does not."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class AnswerRecorder:
    """Collects one answer. Created when the request is sent."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sent_at_s = clock()
        self._event_times_s = array("d")
        self._event_tokens = 0
        self._ids_seen = False
        self.usage = ReportedUsage()
        """What the server said last."""

    def token_event(self, at_s: float, id_count: int | None) -> None:
        """Notes an event with tokens. `id_count` is given where the event has it."""
        self._event_times_s.append(at_s)
        self._event_tokens += 1 if id_count is None else id_count
        self._ids_seen = self._ids_seen or id_count is not None

    def completed(self) -> Answer:
        """Returns the completed answer. One without any token is a failure: nothing about it could be measured."""
        if self._output_tokens == 0:
            return self.failed("no tokens", "the answer ended without reporting a token")
        return self._answer(None)

    def failed(self, kind: str, message: str) -> Answer:
        return self._answer(Failure(kind, message))

    @property
    def _output_tokens(self) -> int:
        return self._event_tokens if self.usage.completion_tokens is None else self.usage.completion_tokens

    def _answer(self, failure: Failure | None) -> Answer:
        counted_by = "ids" if self._ids_seen else "events"
        return Answer(
            sent_at_s=self._sent_at_s,
            ended_at_s=self._clock(),
            event_times_s=self._event_times_s,
            output_tokens=self._output_tokens,
            counted_by=counted_by if self.usage.completion_tokens is None else "usage",
            prompt_tokens=self.usage.prompt_tokens,
            cached_tokens=self.usage.cached_tokens,
            failure=failure,
        )


OnRecord = Callable[[Record], None]
"""Called after every request."""


@dataclass(frozen=True, slots=True)
class PlanResult:
    records: tuple[Record, ...]
    client_cpu_s: float


async def run_plan(
    client: Client, plan: Sequence[PlannedRequest], concurrency: int | None, on_record: OnRecord
) -> PlanResult:
    """Sends the planned requests with `concurrency` of them open, or as an open loop where that is None."""
    gc.collect()  # now rather than in the middle of the measurement
    cpu_before_s = time.process_time()
    if concurrency is not None:
        records = await fixed_concurrency(client, plan, concurrency, on_record)
    else:
        records = await open_loop(client, plan, time.perf_counter, on_record)
    return PlanResult(tuple(records), time.process_time() - cpu_before_s)


async def open_loop(client: Client, plan: Sequence[PlannedRequest], clock: Clock, on_record: OnRecord) -> list[Record]:
    """Sends every request when it is due, or as soon after that as this process can."""
    records: list[Record] = []
    start_s = clock()

    async def one(planned: PlannedRequest, due_at_s: float, send: Send) -> None:
        records.append(Record(planned, due_at_s, await send()))
        on_record(records[-1])

    async with asyncio.TaskGroup() as tasks:
        for planned in plan:
            assert planned.due_s is not None
            due_at_s = start_s + planned.due_s
            send = client.prepare(planned)  # while there is time; 1 ms for a prompt of 12000 tokens
            await asyncio.sleep(max(0.0, due_at_s - clock()))
            tasks.create_task(one(planned, due_at_s, send))
    return records


async def fixed_concurrency(
    client: Client, plan: Sequence[PlannedRequest], concurrency: int, on_record: OnRecord
) -> list[Record]:
    """Starts the next request as soon as one ends."""
    records: list[Record] = []

    async def lane(waiting: Iterator[PlannedRequest]) -> None:
        for planned in waiting:
            records.append(Record(planned, None, await client.prepare(planned)()))
            on_record(records[-1])

    waiting = iter(plan)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(concurrency, len(plan))):
            tasks.create_task(lane(waiting))
    return records
