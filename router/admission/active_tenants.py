"""Which claimants ask, and how many slots of decode workers their answers hold. Pure.

As long as all requests are those of one claimant, their order hardly matters.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from router.admission.fair_queue import SIBLINGS_AT_ONCE
from router.admission.queued_request import Wanting
from twostroke.ids import RequestId, WorkerId

REMEMBERED_S = 60.0
"""A claimant that asks now and then is one all the time: others' work must not pile up between its requests."""


class Claimant(NamedTuple):
    priority: int
    tenant: str
    siblings: int
    """Answers of a request for so many that others would wait for them; 0: for fewer."""


def claimant_of(wanting: Wanting) -> Claimant:
    count = wanting.siblings.count
    return Claimant(wanting.priority, wanting.tenant, count if count > SIBLINGS_AT_ONCE else 0)


class Claimants:
    def __init__(self) -> None:
        self._asked_at_s: dict[Claimant, float] = {}
        """The longest ago first."""

    @property
    def are_several(self) -> bool:
        return len(self._asked_at_s) > 1

    def has_rivals(self, claimant: Claimant) -> bool:
        """Others ask whose class is not below its own."""
        return any(each != claimant and each.priority >= claimant.priority for each in self._asked_at_s)

    def ask(self, wanting: Wanting, now_s: float) -> None:
        claimant = claimant_of(wanting)
        self._asked_at_s.pop(claimant, None)
        self._asked_at_s[claimant] = now_s
        while next(iter(self._asked_at_s.values())) + REMEMBERED_S < now_s:
            del self._asked_at_s[next(iter(self._asked_at_s))]


class Slots:
    """Slots of decode workers that answers hold, those on their way there included."""

    def __init__(self) -> None:
        self._held: dict[RequestId, tuple[WorkerId, Claimant]] = {}
        self._counts: Counter[tuple[WorkerId, Claimant]] = Counter()

    def take(self, request_id: RequestId, worker: WorkerId, claimant: Claimant) -> None:
        """The answer goes to `worker`; it leaves the worker that it had before."""
        self.give_back(request_id)
        self._held[request_id] = worker, claimant
        self._counts[worker, claimant] += 1

    def give_back(self, request_id: RequestId) -> None:
        """The answer is over. Nothing happens where it held none."""
        held = self._held.pop(request_id, None)
        if held is None:
            return
        self._counts[held] -= 1
        if not self._counts[held]:
            del self._counts[held]

    def taken(self, worker: WorkerId, claimant: Claimant) -> int:
        return self._counts[worker, claimant]
