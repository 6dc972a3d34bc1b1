"""How fast pages come from each other worker, as this worker's own pulls have measured it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from twostroke.ids import WorkerId

MOST_PEERS = 64
"""Those that pages came from last."""
FORGET_S = 900.0
"""After so long without a page, what was measured says nothing any more."""
WEIGHT = 0.125
"""Of a new measurement, as in TCP's estimate of round trips (Jacobson 1988)."""
SLOW_WEIGHT = 0.02
"""Of an answer that took longer than before: the peer's queue is part of it, and that is not the link's."""
OUTLIER = 3.0
"""What took this many times longer than expected met something else on the way: it counts as that long at most."""


@dataclass(frozen=True, slots=True)
class Link:
    """0 while unknown."""

    latency_s: float = 0.0
    """From asking to the first page that was there already."""
    transfer_bytes: float = 0.0
    transfer_s: float = 0.0
    """Both of a usual transfer: large ones say more about the rate than small ones."""
    measured_s: float = 0.0
    """When, by the caller's clock."""

    @property
    def bytes_per_s(self) -> float:
        return self.transfer_bytes / self.transfer_s if self.transfer_s else 0.0


class LinkRates:
    def __init__(self) -> None:
        self._links: dict[WorkerId, Link] = {}
        """The one measured last comes last."""

    def answered(self, peer: WorkerId, latency_s: float, now_s: float) -> None:
        """The first page that `peer` held already was announced so long after it had been asked for."""
        link = self._links.get(peer, Link())
        if link.latency_s:
            weight = WEIGHT if latency_s < link.latency_s else SLOW_WEIGHT
            latency_s = link.latency_s + weight * (min(latency_s, OUTLIER * link.latency_s) - link.latency_s)
        self._note(peer, replace(link, latency_s=latency_s, measured_s=now_s))

    def copied(self, peer: WorkerId, copied_bytes: int, seconds: float, now_s: float) -> None:
        """So many bytes are here and verified, so long after their copy began."""
        if copied_bytes <= 0 or seconds <= 0:
            return
        link = self._links.get(peer, Link())
        if link.bytes_per_s:
            seconds = min(seconds, OUTLIER * copied_bytes / link.bytes_per_s)
        weight = WEIGHT if link.transfer_s else 1.0
        moved = link.transfer_bytes + weight * (copied_bytes - link.transfer_bytes)
        took_s = link.transfer_s + weight * (seconds - link.transfer_s)
        self._note(peer, replace(link, transfer_bytes=moved, transfer_s=took_s, measured_s=now_s))

    def known(self, now_s: float) -> Mapping[WorkerId, Link]:
        """Links of which the rate is known, without those that were not used for long."""
        self._links = {peer: link for peer, link in self._links.items() if now_s - link.measured_s < FORGET_S}
        return {peer: link for peer, link in self._links.items() if link.bytes_per_s}

    def _note(self, peer: WorkerId, link: Link) -> None:
        self._links.pop(peer, None)
        self._links[peer] = link
        if len(self._links) > MOST_PEERS:
            del self._links[next(iter(self._links))]
