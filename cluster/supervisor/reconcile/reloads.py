"""Changes the weights of all workers, one worker at a time, and gives new weights up that a worker cannot load."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from cluster.supervisor.backend import WorkerDied
from cluster.supervisor.fleet import Changes, SupervisedFleet
from cluster.supervisor.reconcile.desired import DesiredFleet
from cluster.supervisor.reconcile.drains import DEADLINE_S, Drains
from cluster.supervisor.reconcile.replacement import check_replacement
from cluster.supervisor.reconcile.weights import (
    LoadedWorker,
    is_changing,
    last_decode_worker,
    next_to_reload,
    weights_after_failure,
    weights_now,
)
from cluster.values.desired_state import Checkpoint, Weights
from cluster.values.spec import FleetSpec
from twostroke.base.errors import PeerLost, ServeError

log = logging.getLogger(__name__)

CRASHES_TO_GIVE_UP = 3
"""Crashes in a row of a worker with new weights before the fleet stays with, or returns to, those that it had."""


class Reloads:
    def __init__(
        self, fleet: SupervisedFleet, desired: DesiredFleet, drains: Drains, changes: Changes, spec: FleetSpec
    ) -> None:
        self._fleet = fleet
        self._desired = desired
        self._drains = drains
        self._changes = changes
        self._spec = spec
        self._load_error: ServeError | None = None
        """Why the last reload was given up."""
        self._deadline_s = DEADLINE_S
        """Seconds that requests have on a worker that is to load other weights."""

    @property
    def is_running(self) -> bool:
        """Whether workers have to begin anew, or requests have to go elsewhere, before a reload is over."""
        weights = self._desired.state.weights
        return bool(weights.latest) and is_changing(self._loaded(), weights)

    async def reload(self, model: str, deadline_s: float) -> list[str]:
        """Returns when all workers that serve have these weights, with those that wait for a node of Ray.

        Raises ConfigError, or PeerLost, also where one worker cannot be spared while others wait for a node.
        """
        desired, served = self._desired, self._spec.workers[0].model
        now, loaded = desired.state.weights.wanted.model or served.model, self._fleet.fingerprints()
        await asyncio.to_thread(check_replacement, served, now, model, loaded)
        weights = desired.state.weights
        if weights.wanted != weights.routed:
            raise PeerLost("the fleet is loading other weights already: try again when it has them")
        wanted = Checkpoint(model or weights.wanted.model, weights.latest + 1)
        self._deadline_s, self._load_error = deadline_s, None
        reason = f"the fleet was told to load {wanted.model or served.model}"
        weights = Weights(wanted, weights.routed, before=weights.routed, latest=wanted.number)
        desired.write(replace(desired.state, weights=weights, reason=reason))
        log.info("weights change model=%s number=%d", wanted.model or served.model, wanted.number)
        while (waiting := self._waiting_for_room(wanted)) is None:
            if desired.state.weights.wanted != wanted:
                raise self._load_error or PeerLost("another command has changed the fleet's weights meanwhile")
            await self._fleet.changed.wait()
        return waiting

    def look(self, tasks: asyncio.TaskGroup) -> None:
        """Lets new requests go to the new weights once enough workers have them, and begins the next reload."""
        state = self._desired.state
        if not state.weights.latest:
            return
        workers = self._loaded()
        weights = weights_now(workers, state.weights)
        if weights != state.weights:
            log.info("requests go to the new weights model=%s number=%d", weights.routed.model, weights.routed.number)
            self._desired.write(replace(state, weights=weights))
        is_busy = any(not self._fleet.has_no_room(name) for name in self._changes.busy)
        if not is_busy and (worker_id := next_to_reload(workers, weights)) is not None:
            self._changes.begin(worker_id, self._begin_anew(worker_id, tasks), tasks)

    def could_not_serve(self, worker_id: str, error: ServeError, crashes: int) -> None:
        """Notes that an epoch has failed. New weights are given up for that while other workers have the old ones."""
        state = self._desired.state
        before = weights_after_failure(self._loaded(), state.weights)
        if before == state.weights or (isinstance(error, WorkerDied) and crashes < CRASHES_TO_GIVE_UP):
            return
        self._load_error = type(error)(f"{worker_id} cannot load the weights: {error.message}", field=error.field)
        model = state.weights.wanted.model
        log.error("weights given up worker=%s model=%s error=%s", worker_id, model, error.message)
        reason = f"weights of {model} were given up: {error.message}"
        self._desired.write(replace(state, weights=before, reason=reason))

    def _loaded(self) -> list[LoadedWorker]:
        return self._desired.loaded(self._changes.busy)

    def _waiting_for_room(self, wanted: Checkpoint) -> list[str] | None:
        """Returns the workers without a process where all others have these weights; None while some have not.

        Raises PeerLost where only a worker is left that cannot be spared before one of those serves.
        """
        workers = self._loaded()
        waiting = [each.worker_id for each in workers if each.has_no_room]
        outdated = [each for each in workers if each.checkpoint != wanted and not each.has_no_room]
        is_at_rest = all(each.checkpoint is not None for each in outdated)
        held_back = last_decode_worker(workers)
        is_last = held_back is not None and next_to_reload(workers, self._desired.state.weights) is None
        if is_last and is_at_rest and outdated:
            raise PeerLost(
                f"Ray has no node with room for {', '.join(waiting)}, and {held_back} is the last decode worker that "
                "serves: it loads the weights as soon as another one serves"
            )
        return None if outdated else waiting

    async def _begin_anew(self, worker_id: str, tasks: asyncio.TaskGroup) -> None:
        try:
            await self._drains.drain(worker_id, self._deadline_s, True, tasks)
        except PeerLost as error:
            log.warning("worker does not load the weights yet worker=%s error=%s", worker_id, error)
