"""Follows the router's index, worker by worker, as far as it speaks of the chat's blocks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import grpc

from cluster.clients.admin_access import Metadata
from twostroke.ids import BlockHash
from twostroke.rpc.convert import hashes_from_bytes
from twostroke.rpc.v1 import control_pb2, control_pb2_grpc


@dataclass(slots=True)
class Seen:
    """What the index says of one worker."""

    sequence: int = 0
    holds: dict[int, set[BlockHash]] = field(default_factory=dict)
    """The chat's blocks that the worker holds, by tier."""
    has_held: set[BlockHash] = field(default_factory=set)


class IndexWatch:
    """A thread of its own from `with` to the end of it."""

    def __init__(self, channel: grpc.Channel, metadata: Metadata, names: Sequence[BlockHash]) -> None:
        self._call: Iterator[control_pb2.KvEventBatch] = control_pb2_grpc.ControlStub(channel).SubscribeKvEvents(
            control_pb2.SubscribeKvEventsRequest(), metadata=metadata
        )
        self._names = tuple(names)
        self._wanted = frozenset(names)
        self._seen: dict[str, Seen] = {}
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._follow, name="index watch", daemon=True)

    def __enter__(self) -> IndexWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert isinstance(self._call, grpc.RpcContext)
        self._call.cancel()
        self._thread.join()

    def until_held(self, blocks: int, timeout_s: float) -> None:
        """Wait until some worker holds that many leading blocks, or the time is over."""
        self._until(lambda: any(self.held(worker) >= blocks for worker in self._seen), timeout_s)

    def until_sequence(self, worker: str, sequence: int, timeout_s: float) -> None:
        self._until(lambda: (self.sequence(worker) or 0) >= sequence, timeout_s)

    def sequence(self, worker: str) -> int | None:
        with self._changed:
            return self._seen[worker].sequence if worker in self._seen else None

    def held(self, worker: str) -> int:
        """Leading blocks, on any tier."""
        with self._changed:
            here = set().union(*self._seen[worker].holds.values()) if worker in self._seen else set()
        return next((depth for depth, name in enumerate(self._names) if name not in here), len(self._names))

    def stored(self, worker: str) -> int:
        """Blocks held at any time."""
        with self._changed:
            return len(self._seen[worker].has_held) if worker in self._seen else 0

    def _until(self, is_so: Callable[[], bool], timeout_s: float) -> None:
        give_up_s = time.monotonic() + timeout_s
        with self._changed:
            while not is_so() and (left_s := give_up_s - time.monotonic()) > 0:
                self._changed.wait(left_s)

    def _follow(self) -> None:
        try:
            for batch in self._call:
                with self._changed:
                    self._take(batch)
                    self._changed.notify_all()
        except grpc.RpcError:
            return  # cancelled, or the router is gone: then the calls that matter fail, too

    def _take(self, batch: control_pb2.KvEventBatch) -> None:
        seen = self._seen.setdefault(batch.worker_id, Seen())
        seen.sequence = batch.sequence
        if batch.snapshot or batch.cleared:
            seen.holds.clear()
        self._change(seen, control_pb2.TIER_DEVICE, batch.stored, batch.removed)
        for change in batch.lower_tiers:
            self._change(seen, change.tier, change.stored, change.removed)

    def _change(self, seen: Seen, tier: int, stored: bytes, removed: bytes) -> None:
        holds = seen.holds.setdefault(tier, set())
        holds -= self._wanted.intersection(hashes_from_bytes(removed))
        holds |= self._wanted.intersection(hashes_from_bytes(stored))
        seen.has_held |= holds
