"""Watches for Ray nodes that are about to end and drains their workers, which then restart elsewhere.

Ray puts nothing on such a node any more, restarted actors included, so a new process is all that a worker needs.
"""

from __future__ import annotations

import asyncio
import logging

from cluster.supervisor.backend import FleetBackend, Nodes
from cluster.supervisor.fleet import SupervisedFleet
from cluster.supervisor.reconcile.drains import Drains
from cluster.supervisor.reconcile.plan import leaves
from twostroke.base.errors import PeerLost

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""Seconds between two looks. A preemption is announced half a minute ahead or more."""


class NodeWatch:
    def __init__(self, backend: FleetBackend, fleet: SupervisedFleet, drains: Drains) -> None:
        self._backend = backend
        self._fleet = fleet
        self._drains = drains
        self._nodes = Nodes({}, has_others=True)
        self._is_answered = True

    async def watch(self, tasks: asyncio.TaskGroup) -> None:
        """Watches until cancelled; each drain is a task of `tasks`."""
        while True:
            try:
                self._look(await self._backend.nodes(), tasks)
                self._is_answered = True
            except PeerLost as error:
                if self._is_answered:
                    log.warning("nodes unknown error=%s", error)
                self._is_answered = False
            await asyncio.sleep(LOOK_S)

    def _look(self, nodes: Nodes, tasks: asyncio.TaskGroup) -> None:
        before, self._nodes = self._nodes, nodes
        self._fleet.leave_nodes(nodes.leaving)
        placed_workers = self._fleet.placed_workers()
        for node_id in nodes.leaving.keys() - before.leaving.keys():
            workers = [worker.worker_id for worker in placed_workers if worker.node_id == node_id]
            log.info(
                "node shall be left node=%s ends_in_s=%.1f workers=%s",
                *(node_id, nodes.leaving[node_id], ",".join(workers)),
            )
            if workers and not nodes.has_others:
                log.warning("no other node: workers stay until the end is near, then wait for a node node=%s", node_id)
        for leave in leaves(placed_workers, nodes.leaving, has_others=nodes.has_others):
            self._drains.move(leave.worker_id, leave.deadline_s, tasks)
