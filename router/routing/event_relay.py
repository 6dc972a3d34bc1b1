"""Passes the KV events of workers on to subscribers of the router: a snapshot of each worker, then its batches."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Generator

from router.routing.prefix_index import PrefixIndex
from twostroke.base.ids import Epoch, WorkerId
from twostroke.kv_cache.block import HASH_BYTES
from twostroke.kv_cache.events import EventBatch
from twostroke.rpc.events import batch_to_message
from twostroke.rpc.v1.control_pb2 import KvEventBatch, SubscribeKvEventsRequest

MAX_BEHIND = 4096
"""Most batches that wait for a slow subscriber. When there are more, it starts again from snapshots."""


class EventRelay:
    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._readers: set[_Reader] = set()

    def publish(self, message: KvEventBatch) -> None:
        """Passes on a batch, or a part of one. The index must have applied it."""
        for reader in self._readers:
            reader.offer(message, self._index.workers)

    def left(self, worker: WorkerId) -> None:
        """Publishes that a worker holds no blocks. Call it before the index forgets the worker."""
        epoch = self._index.epoch_of(worker)
        if epoch is not None:
            empty = EventBatch(
                self._index.next_sequence(worker, epoch) or 0, (), (), 0, bytes(HASH_BYTES), snapshot=True
            )
            self.publish(batch_to_message(worker, epoch, empty))

    async def subscribe(self, request: SubscribeKvEventsRequest) -> AsyncIterator[KvEventBatch]:
        reader = _Reader(WorkerId(request.worker_id) if request.worker_id else None)
        index = self._index
        known = {worker: epoch for worker in index.workers if (epoch := index.epoch_of(worker)) is not None}
        begun = request.epoch, request.start_sequence
        reader.start_again([w for w, epoch in known.items() if (str(epoch), index.next_sequence(w, epoch)) != begun])
        self._readers.add(reader)
        try:
            while True:
                message = await reader.next(self._index)
                if message is not None:
                    yield message
        finally:
            self._readers.remove(reader)
            reader.close()


class _Reader:
    """The batches and snapshots that one subscriber has still to get."""

    def __init__(self, only: WorkerId | None) -> None:
        self._only = only
        self._batches: deque[KvEventBatch] = deque()
        self._restarts: list[WorkerId] = []
        """Workers whose snapshots the subscriber gets next."""
        self._parts: Generator[KvEventBatch] | None = None
        """The rest of a snapshot that is being sent."""
        self._incomplete: set[WorkerId] = set()
        """Workers whose snapshots have to wait for the end of their next batch: the index is not complete before."""
        self._changed = asyncio.Event()

    def start_again(self, workers: list[WorkerId]) -> None:
        """Drops what waits, and has the snapshots of these workers sent next."""
        self.close()
        self._batches.clear()
        self._incomplete.clear()
        self._restarts = [worker for worker in workers if self._only in (None, worker)]
        self._changed.set()

    def close(self) -> None:
        """Stops a snapshot that is being sent."""
        if self._parts is not None:
            self._parts.close()
            self._parts = None

    def offer(self, message: KvEventBatch, workers: list[WorkerId]) -> None:
        if self._only not in (None, message.worker_id) or message.worker_id in self._restarts:
            return
        if message.worker_id in self._incomplete:
            if not message.more:
                worker = WorkerId(message.worker_id)
                self._incomplete.remove(worker)
                self._restarts.append(worker)
                self._changed.set()
            return
        if len(self._batches) >= MAX_BEHIND:
            self.start_again(workers)
            return
        self._batches.append(message)
        self._changed.set()

    async def next(self, index: PrefixIndex) -> KvEventBatch | None:
        if self._parts is not None:
            part = next(self._parts, None)
            if part is not None:
                return part
            self._parts = None
        while not self._restarts and not self._batches:
            self._changed.clear()
            await self._changed.wait()
        if not self._restarts:
            return self._batches.popleft()
        return self._begin_snapshot(self._restarts.pop(0), index)

    def _begin_snapshot(self, worker: WorkerId, index: PrefixIndex) -> KvEventBatch | None:
        """Returns the first part of a snapshot, or None if there is none now."""
        epoch = index.epoch_of(worker)
        if epoch is None:
            return None
        self._parts = _messages(worker, epoch, index.snapshot_parts(worker))
        first = next(self._parts, None)
        if first is None:
            self._parts = None
            self._incomplete.add(worker)
        return first


def _messages(worker: WorkerId, epoch: Epoch, parts: Generator[EventBatch]) -> Generator[KvEventBatch]:
    with contextlib.closing(parts):
        for part in parts:
            yield batch_to_message(worker, epoch, part)
