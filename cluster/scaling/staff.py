"""Owner of the roster: makes the fleet what it says, one worker of a role at a time where that one serves.

Every look begins from the roster and from what is so, never from what was done last: a supervisor that dies in the
middle of a change is followed by one that goes on with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Protocol

from cluster.drains import DEADLINE_S, Drains
from cluster.ground import Departure, Ground, WorkerHandle
from cluster.plan import Stage
from cluster.planner import Counts
from cluster.scaling.changes import counts_of, revised
from cluster.scaling.roster import Post, Roster
from cluster.spec import FleetSpec
from twostroke.config import Role, WorkerConfig
from twostroke.errors import ConfigError, InvalidRequest, NotFound, PeerLost
from twostroke.rpc.v1 import fleet_pb2

log = logging.getLogger(__name__)

SWITCH_S = 3.0
"""For a worker that becomes the other role to hand over what it has; what is left then goes on elsewhere all the same.
"""


class Fleet(Protocol):
    """What this needs of the supervisor."""

    def stage(self, worker_id: str) -> Stage:
        """Raises NotFound."""

    def role(self, worker_id: str) -> Role:
        """That it serves in, or shall begin in."""

    def handle(self, worker_id: str) -> WorkerHandle: ...

    def add(self, config: WorkerConfig) -> None: ...

    def forget(self, worker_id: str) -> None: ...

    def wake(self) -> None:
        """Something is to be done: look at everybody."""

    async def until(self, worker_id: str, is_so: Callable[[Stage], bool]) -> None: ...


class Staff:
    def __init__(self, fleet: Fleet, ground: Ground, drains: Drains, spec: FleetSpec) -> None:
        self._fleet = fleet
        self._ground = ground
        self._drains = drains
        self._spec = spec
        self._busy: set[str] = set()
        """Leave or switch now."""
        self._changes = self._switches = 0
        """In this life of the supervisor."""
        written = ground.roster()
        if written is not None and written.fleet == spec.identity:
            self.roster = written
        else:
            self.roster = Roster.of(spec.identity, spec.workers, is_automatic=spec.scales)

    def configs(self) -> list[WorkerConfig]:
        return [self._spec.worker(worker_id, post.role) for worker_id, post in self.roster.posts.items()]

    def shall_be(self, worker_id: str) -> Role:
        return self.roster.posts[worker_id].role

    @property
    def wanted(self) -> Counts:
        return counts_of(self.roster)

    def to_message(self) -> fleet_pb2.Scaling:
        wanted = self.wanted
        return fleet_pb2.Scaling(
            wanted_prefill=wanted.prefill,
            wanted_decode=wanted.decode,
            automatic=self.roster.is_automatic,
            changes=self._changes,
            switches=self._switches,
        )

    def scale(self, wanted: Counts, held: Mapping[str, int], *, is_automatic: bool, reason: str) -> None:
        """Who shall be there from now on."""
        may_switch = self._spec.flexible
        roster = revised(self.roster, wanted, held, may_switch=may_switch)
        if roster.posts != self.roster.posts:
            self._changes += 1
            log.info("scaling before=%s wanted=%s reason=%s", self.wanted, wanted, reason)
        self._write(replace(roster, is_automatic=is_automatic, reason=reason))
        self._ground.ask_for_room(self.wanted)

    def set_automatic(self, *, is_automatic: bool) -> None:
        self._write(replace(self.roster, is_automatic=is_automatic))

    async def assign(self, worker_id: str, role: Role) -> None:
        """Returns when the worker serves in this role. Raises NotFound, ConfigError or InvalidRequest."""
        post = self.roster.posts.get(worker_id)
        if post is None or post.is_retiring:
            raise NotFound(f"there is no worker {worker_id!r}; there are {', '.join(self.roster.posts)}")
        if role is post.role:
            return
        if not self._spec.flexible:
            raise ConfigError(
                "workers of this fleet keep their roles: start it with --flexible, or with room between --min-* and "
                "--max-* of both roles",
                field="--flexible",
            )
        if role is Role.PREFILL and self.wanted.decode == 1:
            raise InvalidRequest(f"{worker_id} is the last decode worker: add one first", field="worker")
        roster = self.roster.with_post(worker_id, Post(role))
        self._write(replace(roster, is_automatic=False, reason=f"{worker_id} was told to {role}"))
        while self._fleet.role(worker_id) is not role or self._fleet.stage(worker_id) is not Stage.SERVING:
            await self._fleet.until(worker_id, lambda stage: stage is not Stage.SERVING)
            await self._fleet.until(worker_id, lambda stage: stage in (Stage.SERVING, Stage.FAILED))

    def look(self, tasks: asyncio.TaskGroup) -> None:
        """Begin what can begin now."""
        for worker_id, post in self.roster.posts.items():
            try:
                stage = self._fleet.stage(worker_id)
            except NotFound:
                self._fleet.add(self._spec.worker(worker_id, post.role))
                continue
            if worker_id in self._busy:
                continue
            if post.is_retiring:
                if stage is Stage.ABSENT:  # maybe it is found
                    self._ground.set_departure(worker_id, Departure.AWAY)
                elif stage is not Stage.SERVING or self._can_be_spared(worker_id):
                    self._begin(worker_id, self._retire(worker_id, stage, tasks), tasks)
            elif self.shall_switch(worker_id) and stage is Stage.SERVING and self._can_be_spared(worker_id):
                self._begin(worker_id, self._switch(worker_id, tasks), tasks)

    def shall_switch(self, worker_id: str) -> bool:
        return self._fleet.role(worker_id) is not self.roster.posts[worker_id].role

    def _can_be_spared(self, worker_id: str) -> bool:
        """Prompts are computed without prefill workers, too; answers come of decode workers alone."""
        if self._fleet.role(worker_id) is Role.PREFILL:
            return True
        others = (name for name in self.roster.posts if name != worker_id and name not in self._busy)
        return any(
            self._fleet.role(name) is Role.DECODE and self._fleet.stage(name) is Stage.SERVING
            for name in others
            if self._is_known(name)
        )

    def _is_known(self, worker_id: str) -> bool:
        try:
            self._fleet.stage(worker_id)
        except NotFound:
            return False
        return True

    def _begin(self, worker_id: str, work: Coroutine[None, None, None], tasks: asyncio.TaskGroup) -> None:
        self._busy.add(worker_id)
        task = tasks.create_task(work)
        task.add_done_callback(lambda _: self._end(worker_id))

    def _end(self, worker_id: str) -> None:
        self._busy.discard(worker_id)
        self._fleet.wake()

    async def _retire(self, worker_id: str, stage: Stage, tasks: asyncio.TaskGroup) -> None:
        if stage in (Stage.SERVING, Stage.DRAINING, Stage.DRAINED):
            try:
                await self._drains.drain(worker_id, DEADLINE_S, False, tasks)
            except PeerLost as error:
                log.warning("worker does not retire yet worker=%s error=%s", worker_id, error)
                return
        else:
            self._ground.set_departure(worker_id, Departure.AWAY)
            if stage is not Stage.DEAD:
                self._fleet.handle(worker_id).remove()
            await self._fleet.until(worker_id, lambda now: now in (Stage.DRAINED, Stage.FAILED, Stage.SERVING))
            if self._fleet.stage(worker_id) is Stage.SERVING:
                return
        self._ground.set_departure(worker_id, None)
        self._fleet.forget(worker_id)
        self._write(self.roster.without(worker_id))
        log.info("worker has retired worker=%s", worker_id)

    async def _switch(self, worker_id: str, tasks: asyncio.TaskGroup) -> None:
        self._switches += 1
        started_s = asyncio.get_running_loop().time()
        try:
            left = await self._drains.switch(worker_id, SWITCH_S, tasks)
        except PeerLost as error:
            log.warning("worker does not switch yet worker=%s error=%s", worker_id, error)
            return
        seconds = asyncio.get_running_loop().time() - started_s
        log.info(
            "switched worker=%s role=%s cut_off=%d seconds=%.2f", worker_id, self.shall_be(worker_id), left, seconds
        )

    def _write(self, roster: Roster) -> None:
        if roster != self.roster:
            self._ground.set_roster(roster)
            self.roster = roster
            self._fleet.wake()
