"""What another worker is expected to send of a prompt, and when: what other suppliers compete with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.rpc.peer import PeerPrefix
from twostroke.rpc.v1 import worker_pb2
from twostroke.worker.measured.link_rates import Link


@dataclass(frozen=True, slots=True)
class ExpectedPages:
    """The pages that another worker will send of a prompt's first blocks, and when, in seconds from now."""

    blocks: int
    cached_blocks: int
    """The first ones, which it does not compute."""
    fetch_s: float
    """Time until it has those."""
    wait_s: float
    """Time until it begins to compute the others."""
    compute_s: float
    """Time of computing them."""
    latency_s: float
    page_s: float
    """Time of carrying one page, as measured on the link from there."""

    @classmethod
    def of_source(
        cls, forecast: worker_pb2.SourceForecast, blocks: int, link: Link, page_bytes: int
    ) -> ExpectedPages | None:
        """Returns what a page source will send; None while nothing was measured on the link."""
        if not link.bytes_per_s:
            return None
        return cls(
            blocks, forecast.cached_blocks, forecast.fetch_s, forecast.wait_s, forecast.compute_s,
            link.latency_s, page_bytes / link.bytes_per_s,
        )  # fmt: skip

    @classmethod
    def of_peer(cls, peer: PeerPrefix, link: Link, page_bytes: int) -> ExpectedPages | None:
        """Returns what a peer will send from its cache; None while nothing was measured on the link."""
        if not link.bytes_per_s:
            return None
        page_s = page_bytes / link.bytes_per_s
        return cls(peer.blocks, peer.blocks, peer.load_s, 0.0, 0.0, link.latency_s, page_s)

    def arrival_s(self, blocks: Sequence[int]) -> float:
        """Returns when the last of these blocks, in ascending order, will be here; infinity if they are not
        expected."""
        last = blocks[-1]
        if last >= self.blocks:
            return math.inf
        carried_s = self.fetch_s + len(blocks) * self.page_s
        if last < self.cached_blocks:
            return self.latency_s + carried_s
        computed = (last + 1 - self.cached_blocks) / (self.blocks - self.cached_blocks)
        computed_s = self.wait_s + computed * self.compute_s + self.page_s
        return self.latency_s + max(carried_s, computed_s)

    def batches(self, blocks: Sequence[int]) -> list[list[int]]:
        """Divides blocks by how they come: those that the other worker has, and those that it will compute."""
        cached = self.cached_blocks
        batches = [[block for block in blocks if block < cached], [block for block in blocks if block >= cached]]
        return [batch for batch in batches if batch]
