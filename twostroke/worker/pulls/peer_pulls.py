"""Peer pulls: a worker that is about to compute a prompt fetches what a peer holds of it while its own queue drains.

The peer serves from its cache alone. A peer pull is given up when computing would have been done, so waiting for it
costs at most that much again (ski rental: Karlin et al., "Competitive snoopy caching", Algorithmica 1988).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from twostroke.ids import WorkerId
from twostroke.rpc.peer import ANSWER_S, PeerPrefix
from twostroke.scheduler.sequence import Sequence
from twostroke.tracing.span import OpenSpan
from twostroke.worker.pulls.ordered_pull import ExpectedPages
from twostroke.worker.pulls.pull_spec import PullReport, PullSpec, windows_of
from twostroke.worker.role_host import RoleHost


class PeerPulls:
    """Peer pulls of one role; `tasks` end with the worker."""

    def __init__(self, host: RoleHost, tasks: asyncio.TaskGroup) -> None:
        self._host = host
        self._tasks = tasks

    def expected(self, peer: PeerPrefix) -> ExpectedPages | None:
        """Return what the peer will send; None if nothing is pulled there, or nothing is known of the link."""
        host, worker_id = self._host, WorkerId(peer.worker.worker_id)
        if worker_id == host.config.worker_id:
            return None
        return ExpectedPages.of_peer(peer, host.pulls.links.of(worker_id), host.facts.page_bytes)

    def start(
        self,
        sequence: Sequence,
        peer: PeerPrefix,
        missing: Iterable[int],
        missing_windows: Iterable[int] = (),
        arrived: Callable[[int], None] | None = None,
        trace: OpenSpan | None = None,
    ) -> asyncio.Future[PullReport] | None:
        """Pull the missing parts that the peer is expected to hold; return None if there are none.

        The blocks are claimed by the sequence, and nobody writes them yet. Blocks that do not arrive are computed.
        """
        host = self._host
        blocks, windows = peer.part_of(missing), peer.part_of(missing_windows)
        if not (blocks or windows) or peer.worker.worker_id == host.config.worker_id:
            return None
        spec = PullSpec(
            sequence.request_id,
            host.new_session(),
            peer.worker,
            list(sequence.known),
            list(sequence.block_hashes),
            {block: sequence.pages[block] for block in blocks},
            windows=windows_of(sequence, windows),
            cached_within_s=ANSWER_S + host.loop.queued_s,
            arrived=arrived,
            trace=trace,
        )
        return host.pulls.start(spec, self._tasks)
