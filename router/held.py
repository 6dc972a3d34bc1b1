"""One request that waits in the router for its turn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from router.policy import Decision
from router.wanting import Wanting
from twostroke.ids import RequestId, WorkerId


@dataclass(slots=True)
class Held:
    wanting: Wanting
    limit_s: float | None
    """When its first token has to be there."""
    decision: Decision
    shares_s: Mapping[WorkerId, float]
    """Seconds that its reservation puts on workers."""
    decided_at_s: float
    latest_start_s: float | None
    """From when on its own prefill would come too late; None where nothing is known of its worker, or no limit set."""

    @property
    def request_id(self) -> RequestId:
        return self.wanting.ask.request_id

    @property
    def computer(self) -> WorkerId:
        return self.decision.source or self.decision.decode


def urgency(held: Held) -> tuple[float, float]:
    return math.inf if held.limit_s is None else held.limit_s, held.wanting.arrived_s


def add_shares(total_s: dict[WorkerId, float], shares_s: Mapping[WorkerId, float], sign: int) -> None:
    for worker, seconds in shares_s.items():
        total_s[worker] = total_s.get(worker, 0.0) + sign * seconds
