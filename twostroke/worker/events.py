"""The worker's event log, as routers follow it: batches in order, a snapshot where the log does not reach back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from twostroke.kv_cache.events import EventBatch, EventLog
from twostroke.worker.news import News


class EventFeed:
    def __init__(self, log: EventLog, heartbeat_s: float) -> None:
        self.log = log
        self._heartbeat_s = heartbeat_s
        self._news = News()

    def publish(self) -> None:
        self.log.publish(time.time())
        self._news.tell()

    def publish_changes(self) -> None:
        if self.log.has_news:
            self.publish()

    async def beat(self) -> None:
        """Publish a batch, if only an empty one, at least every `heartbeat_s`."""
        while True:
            ticket = self._news.ticket()
            try:
                async with asyncio.timeout(self._heartbeat_s):
                    await ticket.wait()
            except TimeoutError:
                self.publish()

    async def follow(self, epoch: str, start_sequence: int) -> AsyncIterator[EventBatch]:
        """Batches from `start_sequence` of `epoch` on; a snapshot first where that cannot be had."""
        known = epoch == str(self.log.epoch)
        batches = self.log.since(start_sequence) if known else None
        while True:
            ticket = self._news.ticket()
            if batches is None:
                batches = [self.log.snapshot()]
            for batch in batches:
                yield batch
                start_sequence = batch.sequence + 1
            if self.log.sequence < start_sequence:
                await ticket.wait()
            batches = self.log.since(start_sequence)
