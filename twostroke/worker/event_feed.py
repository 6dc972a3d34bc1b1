"""The event feed: a worker's event log as routers follow it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Generator, Sequence

from twostroke.kv_cache.events import EventBatch, EventLog, parts_of
from twostroke.worker.condition import Condition, Gathering


class EventFeed:
    """The worker's event log as routers follow it: batches in order, or a snapshot first."""

    def __init__(self, log: EventLog, heartbeat_s: float) -> None:
        self.log = log
        self._heartbeat_s = heartbeat_s
        self._published = Condition()
        self._published_s = 0.0
        """When the last batch was published, on the event loop's clock."""

    def publish(self) -> None:
        self.log.publish(time.time())
        self._published_s = asyncio.get_running_loop().time()
        self._published.notify()

    def publish_changes(self) -> None:
        if self.log.has_changes:
            self.publish()

    async def publish_progress(self, progress: Condition) -> None:
        """Publishes changes after each notice of progress, or some milliseconds later where notices are many."""
        gathering = Gathering()
        while True:
            ticket = progress.ticket()
            if self.log.has_changes:
                self.publish()
                gathering.sent()
            await ticket.wait()
            await asyncio.sleep(gathering.left_s)

    async def beat(self) -> None:
        """Publishes a batch at least every `heartbeat_s`, even an empty one."""
        loop = asyncio.get_running_loop()
        self._published_s = loop.time()
        while True:
            silent_s = loop.time() - self._published_s
            if silent_s >= self._heartbeat_s:
                self.publish()
                silent_s = 0.0
            await asyncio.sleep(self._heartbeat_s - silent_s)

    async def follow(self, epoch: str, start_sequence: int) -> AsyncIterator[EventBatch]:
        """Yields batches from `start_sequence` of `epoch` on, after a snapshot if the log does not reach back.

        Long ones come in parts, so that they do not block the event loop for long.
        """
        known = epoch == str(self.log.epoch)
        batches = self.log.since(start_sequence) if known else None
        while True:
            if batches is None:
                self.publish_changes()
            ticket = self._published.ticket()
            with contextlib.closing(self._parts(batches)) as parts:
                for part in parts:
                    yield part
                    start_sequence = part.sequence + 1
            if self.log.sequence < start_sequence:
                await ticket.wait()
            batches = self.log.since(start_sequence)

    def _parts(self, batches: Sequence[EventBatch] | None) -> Generator[EventBatch]:
        """Yields these batches, or a snapshot, in parts."""
        if batches is None:
            yield from self.log.snapshot_parts()
            return
        for batch in batches:
            yield from parts_of(batch)
