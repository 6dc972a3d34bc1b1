"""Sends a plan: as an open loop that never waits for answers, or with a fixed number of requests open."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tools.bench.client import Client, Clock, Send
from tools.bench.load import PlannedRequest
from tools.bench.measure import Record

OnRecord = Callable[[Record], None]
"""Called after every request."""


@dataclass(frozen=True, slots=True)
class Measured:
    records: tuple[Record, ...]
    client_cpu_s: float


async def run_plan(
    client: Client, plan: Sequence[PlannedRequest], concurrency: int | None, on_record: OnRecord
) -> Measured:
    """With `concurrency` requests open, or, where it is None, as an open loop."""
    gc.collect()  # now rather than in the middle of the measurement
    cpu_before_s = time.process_time()
    if concurrency is not None:
        records = await fixed_concurrency(client, plan, concurrency, on_record)
    else:
        records = await open_loop(client, plan, time.perf_counter, on_record)
    return Measured(tuple(records), time.process_time() - cpu_before_s)


async def open_loop(client: Client, plan: Sequence[PlannedRequest], clock: Clock, on_record: OnRecord) -> list[Record]:
    """Every request is sent when it is due, or as soon after as this process can."""
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
    """Start the next request as soon as one ends."""
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
