"""Latency and rate of page transfers from each other worker, as measured by this worker's own pulls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from twostroke.base.ids import WorkerId

MOST_PEERS = 64
"""Peers that are remembered: the last used ones."""
FORGET_S = 900.0
"""Time without a page after which a measurement is dropped."""
WEIGHT = 0.125
"""Weight of a new measurement, as in TCP's estimate of round trips (Jacobson 1988)."""
SLOW_WEIGHT = 0.02
"""Weight of a latency above the estimate, which includes the peer's queue."""
OUTLIER = 3.0
"""A measurement counts for at most this many times the expected time."""


@dataclass(frozen=True, slots=True)
class Link:
    """Measurements of one link; 0 while unknown."""

    latency_s: float = 0.0
    """Time from asking to the announcement of the first cached page."""
    transfer_bytes: float = 0.0
    transfer_s: float = 0.0
    """Time of a usual transfer. Bytes and time are averaged apart, so that large transfers weigh more."""
    measured_s: float = 0.0
    """Time of the last measurement, by the caller's clock."""

    @property
    def bytes_per_s(self) -> float:
        return self.transfer_bytes / self.transfer_s if self.transfer_s else 0.0


class LinkRates:
    def __init__(self) -> None:
        self._links: dict[WorkerId, Link] = {}
        """Links by peer; the last measured one comes last."""

    def answered(self, peer: WorkerId, latency_s: float, now_s: float) -> None:
        """Notes the time until `peer` announced the first page that it had cached."""
        link = self._links.get(peer, Link())
        if link.latency_s:
            weight = WEIGHT if latency_s < link.latency_s else SLOW_WEIGHT
            latency_s = link.latency_s + weight * (min(latency_s, OUTLIER * link.latency_s) - link.latency_s)
        self._note(peer, replace(link, latency_s=latency_s, measured_s=now_s))

    def copied(self, peer: WorkerId, copied_bytes: int, seconds: float, now_s: float) -> None:
        """Notes a verified copy of this many bytes in this many seconds."""
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
        """Returns links with a known rate, without those unused for long."""
        self._links = {peer: link for peer, link in self._links.items() if now_s - link.measured_s < FORGET_S}
        return {peer: link for peer, link in self._links.items() if link.bytes_per_s}

    def of(self, peer: WorkerId) -> Link:
        """Returns the link from this peer, without measurements if no page came from it for long or ever."""
        return self._links.get(peer, Link())

    def _note(self, peer: WorkerId, link: Link) -> None:
        self._links.pop(peer, None)
        self._links[peer] = link
        if len(self._links) > MOST_PEERS:
            del self._links[next(iter(self._links))]
