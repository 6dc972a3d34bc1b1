"""Whether refused requests would have made it: each stays as a ghost in the queue that it would have joined. Pure.

A ghost knows what was ahead of it there. When the last of those has had its first token, or is out of the way, the
ghost's own prefill could have begun; if its first token could still have come in time, refusing it was wrong.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from twostroke.ids import RequestId, WorkerId

MOST_GHOSTS = 4096
"""Followed at once: in a flood of refusals a sample of this size says enough."""


@dataclass(slots=True, eq=False)
class Ghost:
    worker: WorkerId
    """Who would have computed it."""
    latest_start_s: float
    """From when on its own prefill would have come too late."""
    ahead: set[RequestId]


class Ghosts:
    def __init__(self) -> None:
        self.followed = 0
        self.false_refusals = 0
        self._behind: dict[RequestId, set[Ghost]] = {}
        self._behind_others: dict[WorkerId, set[Ghost]] = {}
        """Nothing that this router placed was ahead of them, only what the worker reported."""
        self._until: list[tuple[float, int, Ghost]] = []

    def __len__(self) -> int:
        return len(self._until)

    @property
    def workers(self) -> Iterable[WorkerId]:
        """Whose own queues are waited for."""
        return self._behind_others.keys()

    def add(self, worker: WorkerId, latest_start_s: float, ahead: Iterable[RequestId], now_s: float) -> None:
        self._forget_late(now_s)
        if len(self._until) >= MOST_GHOSTS:
            return
        self.followed += 1
        ghost = Ghost(worker, latest_start_s, set(ahead))
        heapq.heappush(self._until, (latest_start_s, self.followed, ghost))
        for request_id in ghost.ahead:
            self._behind.setdefault(request_id, set()).add(ghost)
        if not ghost.ahead:
            self._behind_others.setdefault(worker, set()).add(ghost)

    def gone(self, request_id: RequestId, now_s: float) -> None:
        """It has had its first token, or is out of everybody's way without one."""
        for ghost in self._behind.pop(request_id, ()):
            ghost.ahead.discard(request_id)
            if not ghost.ahead:
                self.false_refusals += now_s <= ghost.latest_start_s
        self._forget_late(now_s)

    def drained(self, worker: WorkerId, now_s: float) -> None:
        """The worker has said that it has nothing left to compute."""
        for ghost in self._behind_others.pop(worker, ()):
            self.false_refusals += now_s <= ghost.latest_start_s
        self._forget_late(now_s)

    def _forget_late(self, now_s: float) -> None:
        """Those that would have missed their limit by now."""
        while self._until and self._until[0][0] < now_s:
            _, _, ghost = heapq.heappop(self._until)
            for request_id in ghost.ahead:
                behind = self._behind[request_id]
                behind.discard(ghost)
                if not behind:
                    del self._behind[request_id]
            others = self._behind_others.get(ghost.worker)
            if others is not None:
                others.discard(ghost)
                if not others:
                    del self._behind_others[ghost.worker]
