"""What this router has placed on workers that their own reports do not show yet.

Without it every request of a burst would be sent to the worker that was idle before the burst. A reservation counts
until a load report of that worker must have seen it (or the request is over); names of blocks being computed count
until the answer's first token, so that siblings of a burst go where their common prefix is on its way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from twostroke.ids import BlockName, RequestId, WorkerId

REPORT_LAG_S = 0.05
"""From Open's answer to the page source having the pull in its queue: a report that comes later shows it."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one placed answer means for one worker."""

    tokens: int = 0
    """To compute there."""
    seconds: float = 0.0
    """Predicted, of computing them."""
    pages: int = 0
    """To claim there."""
    streams: int = 0
    """1 on the decode worker, 0 on the page source."""


NOTHING = Share()


@dataclass(slots=True)
class _Placed:
    holders: tuple[WorkerId, ...]
    names: Sequence[BlockName]
    opened_at_s: float | None = None


class Reservations:
    def __init__(self) -> None:
        self._placed: dict[RequestId, _Placed] = {}
        self._shares: dict[WorkerId, dict[RequestId, Share]] = {}
        self._coming: dict[BlockName, Counter[WorkerId]] = {}

    def __len__(self) -> int:
        return len(self._placed)

    def place(self, request_id: RequestId, shares: dict[WorkerId, Share], names: Sequence[BlockName]) -> None:
        """Workers with a share in `request_id` will hold `names` soon. A later placement replaces the earlier one."""
        self.end(request_id)
        holders = tuple(shares)
        self._placed[request_id] = _Placed(holders, names)
        for worker, share in shares.items():
            self._shares.setdefault(worker, {})[request_id] = share
        for name in names:
            self._coming.setdefault(name, Counter()).update(holders)

    def opened(self, request_id: RequestId, now_s: float) -> None:
        """The decode worker has the request: its next report shows it."""
        if request_id in self._placed:
            self._placed[request_id].opened_at_s = now_s

    def reported(self, worker: WorkerId, now_s: float) -> None:
        """A load report came in: it shows what was opened long enough ago."""
        for request_id in list(self._shares.get(worker, ())):
            opened_at_s = self._placed[request_id].opened_at_s
            if opened_at_s is not None and opened_at_s + REPORT_LAG_S <= now_s:
                self._drop_share(worker, request_id)

    def end(self, request_id: RequestId) -> None:
        """The first token is there, or the attempt is over."""
        placed = self._placed.pop(request_id, None)
        if placed is None:
            return
        for worker in placed.holders:
            self._drop_share(worker, request_id)
        for name in placed.names:
            coming = self._coming[name]
            for worker in placed.holders:
                coming[worker] -= 1
                if coming[worker] == 0:
                    del coming[worker]
            if not coming:
                del self._coming[name]

    def on(self, worker: WorkerId) -> Share:
        """Everything reserved on one worker."""
        shares = self._shares.get(worker)
        return _sum(shares.values()) if shares else NOTHING

    def requests_on(self, worker: WorkerId) -> int:
        return len(self._shares.get(worker, ()))

    def coming(self, name: BlockName) -> Iterable[WorkerId]:
        """Workers that are about to hold the block."""
        return self._coming.get(name, ())

    def _drop_share(self, worker: WorkerId, request_id: RequestId) -> None:
        shares = self._shares.get(worker, {})
        shares.pop(request_id, None)
        if not shares:
            self._shares.pop(worker, None)


def _sum(shares: Iterable[Share]) -> Share:
    tokens = pages = streams = 0
    seconds = 0.0
    for share in shares:
        tokens += share.tokens
        seconds += share.seconds
        pages += share.pages
        streams += share.streams
    return Share(tokens, seconds, pages, streams)
