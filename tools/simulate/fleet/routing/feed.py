"""A simulated router's event stream from one epoch of a worker, by the rules of the live one (router.fleet.feed).

Batches arrive in order, some time after they were published, unless faults are asked for. Where a batch does not follow
the one before, the stream is asked for again from the missing one on. The worker then sends a replay, or a snapshot.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from tools.simulate.fleet.worker.host import SimulatedHost
from twostroke.kv_cache.events import EventBatch
from twostroke.rpc.v1.control_pb2 import Load

REPLAY_PAUSE_S = 0.02
"""Seconds before a feed asks again, as long as the live feed waits."""


class SimulatedFeed:
    def __init__(
        self,
        host: SimulatedHost,
        hear: Callable[[EventBatch, Load], bool],
        next_sequence: Callable[[], int | None],
        draws: random.Random,
    ) -> None:
        """`hear` returns False where the log does not follow on."""
        self._host = host
        self._hear = hear
        self._next_sequence = next_sequence
        self._draws = draws
        self._delays = host.shape.delays
        self._faults = host.shape.faults
        self._spoils = bool(self._faults.event_drop or self._faults.event_duplicate or self._faults.event_reorder)
        self._stream = 0
        """What is still on its way of an earlier stream is not heard."""
        self._held: tuple[EventBatch, Load] | None = None
        """Comes after the next one."""
        self._last_s = 0.0
        self._is_following = False
        host.queue.after(self._delays.event_s, self._subscribe)

    def close(self) -> None:
        self._stream += 1
        if self._is_following:
            self._host.feed.leave(self._publish)
        self._is_following = False

    def _subscribe(self) -> None:
        host = self._host
        if host.is_dead or self._is_following:
            return
        following = self._next_sequence()
        batches = host.log.since(following) if following is not None else None
        load = host.feed.load_report()
        for batch in [host.log.snapshot()] if batches is None else batches:
            self._send(batch, load)
        self._is_following = True
        host.feed.follow(self._publish)

    def _publish(self, batch: EventBatch, load: Load) -> None:
        if not self._spoils:
            self._send(batch, load)
            return
        draw, faults = self._draws.random(), self._faults
        if draw < faults.event_drop:
            return
        draw -= faults.event_drop
        if draw < faults.event_reorder and self._held is None:
            self._held = batch, load
            return
        self._send(batch, load)
        if faults.event_reorder <= draw < faults.event_reorder + faults.event_duplicate:
            self._send(batch, load)
        held, self._held = self._held, None
        if held is not None:
            self._send(*held)

    def _send(self, batch: EventBatch, load: Load) -> None:
        queue, stream = self._host.queue, self._stream
        jitter_s = self._delays.event_jitter_s
        delay_s = self._delays.event_s + (jitter_s * self._draws.random() if jitter_s else 0.0)
        self._last_s = max(self._last_s, queue.now_s + delay_s)
        queue.at(self._last_s, lambda: self._take(stream, batch, load))

    def _take(self, stream: int, batch: EventBatch, load: Load) -> None:
        if stream != self._stream:
            return
        if self._hear(batch, load):
            return
        self.close()
        again = self._stream

        def subscribe() -> None:
            if again == self._stream:
                self._subscribe()

        self._host.queue.after(REPLAY_PAUSE_S + self._delays.event_s, subscribe)
