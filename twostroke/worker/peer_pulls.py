"""Pulls from peers: whoever is about to compute a prompt fetches what a peer holds of it, while its queue drains.

The peer serves from its cache or not at all, so a peer pull waits for nobody's computation; and it is given up when
computing would have been done: waiting for it costs at most that much again, whatever the peer does (ski rental,
Karlin, Manasse, Rudolph and Sleator, "Competitive snoopy caching", Algorithmica 1988).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from twostroke.rpc.peer import ANSWER_S, PeerPrefix
from twostroke.schedule.sequence import Sequence
from twostroke.tracing.span import OpenSpan
from twostroke.worker.host import WorkerHost
from twostroke.worker.pull_client import PullReport, PullSpec


class PeerPulls:
    """Of one role; `tasks` end with the worker."""

    def __init__(self, host: WorkerHost, tasks: asyncio.TaskGroup) -> None:
        self._host = host
        self._tasks = tasks

    def start(
        self,
        sequence: Sequence,
        peer: PeerPrefix,
        missing: Iterable[int],
        arrived: Callable[[int], None] | None = None,
        trace: OpenSpan | None = None,
    ) -> asyncio.Task[PullReport] | None:
        """Pull those of the missing blocks that the peer is expected to hold; None where there are none.

        The blocks are claimed by the sequence, and nobody writes them yet. What does not come is computed.
        """
        host = self._host
        blocks = peer.part_of(missing)
        if not blocks or peer.worker.worker_id == host.config.worker_id:
            return None
        spec = PullSpec(
            sequence.request_id,
            host.new_session(),
            peer.worker,
            list(sequence.known),
            list(sequence.names),
            {block: sequence.pages[block] for block in blocks},
            resident_within_s=ANSWER_S + host.loop.queued_s,
            arrived=arrived,
            trace=trace,
        )
        return host.pulls.start(spec, self._tasks)
