"""Owner of the roster: makes the fleet what it says, one worker of a role at a time where that one serves.

Every look begins from the roster and from what is so, never from what was done last: a supervisor that dies in the
middle of a change is followed by one that goes on with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Protocol

from cluster.drains import DEADLINE_S, SWITCH_S, Drains
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

GREETING_S = 5.0
"""For a process that was found to say that it serves; one that starts does not so soon."""


class Fleet(Protocol):
    """What this needs of the supervisor."""

    def stage(self, worker_id: str) -> Stage:
        """Raises NotFound."""

    def role(self, worker_id: str) -> Role:
        """That it serves in, or shall begin in."""

    def handle(self, worker_id: str) -> WorkerHandle: ...

    def add(self, config: WorkerConfig) -> None: ...

    def enter(self, worker_id: str, stage: Stage) -> None: ...

    def forget(self, worker_id: str) -> None:
        """It has left; its process is removed."""

    def publish(self) -> None:
        """Watchers are told who shall be there; and look at everybody."""

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
        self._asked: Counts | None = None
        """Workers that room was last asked for; None before that was needed."""
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
        """Workers that shall serve. One that was drained, or cannot start, does not count until it is asked back."""
        return counts_of(self.roster, self._gone())

    def startable(self, wanted: Counts) -> Counts:
        """What a planner may ask for: more of a role in which a worker cannot start would not start either."""
        for role, now, then in zip((Role.PREFILL, Role.DECODE), self.wanted.pair, wanted.pair, strict=True):
            if then > now and self._failed(role):
                return self.wanted
        return wanted

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
        self._forget_failed(wanted)
        roster = revised(self.roster, wanted, held, self._gone(), may_switch=self._spec.flexible)
        if roster.posts != self.roster.posts:
            self._changes += 1
            log.info("scaling before=%s wanted=%s reason=%s", self.wanted, wanted, reason)
        self._write(replace(roster, is_automatic=is_automatic, reason=reason))
        self._ask_for_room()

    def check_may_leave(self, worker_id: str) -> None:
        """Raises InvalidRequest where nobody else of its role serves, NotFound where there is no such worker."""
        if self._fleet.stage(worker_id) is not Stage.SERVING:
            return
        role = self._fleet.role(worker_id)
        others = (name for name in self.roster.staff(role) if name != worker_id and name not in self._busy)
        if not any(self._stage(name) is Stage.SERVING and self._fleet.role(name) is role for name in others):
            raise InvalidRequest(
                f"{worker_id} is the last {role} worker that serves: add one first (twostroke scale), or say --force",
                field="--force",
            )

    def _forget_failed(self, wanted: Counts) -> None:
        """Where more of a role are wanted, those that could not start make room: their names are tried again."""
        for role, now, then in zip((Role.PREFILL, Role.DECODE), self.wanted.pair, wanted.pair, strict=True):
            for name in self._failed(role) if then > now else ():
                self._fleet.forget(name)
                self.roster = self.roster.without(name)

    def _ask_for_room(self) -> None:
        self._asked = self._placed()
        self._ground.ask_for_room(self._asked)

    def _placed(self) -> Counts:
        gone = self._gone()
        return Counts(self.roster.placed(Role.PREFILL, gone), self.roster.placed(Role.DECODE, gone))

    def _gone(self) -> frozenset[str]:
        return frozenset(name for name in self.roster.posts if self._stage(name) in _GONE)

    def _failed(self, role: Role) -> list[str]:
        return [name for name in self.roster.staff(role) if self._stage(name) is Stage.FAILED]

    def set_automatic(self, *, is_automatic: bool) -> None:
        self._write(replace(self.roster, is_automatic=is_automatic))

    async def assign(self, worker_id: str, role: Role) -> None:
        """Returns when the worker serves in this role. Raises NotFound, ConfigError, InvalidRequest or PeerLost."""
        post = self.roster.posts.get(worker_id)
        if post is None or post.is_retiring:
            raise NotFound(f"there is no worker {worker_id!r}; there are {', '.join(self.roster.posts)}")
        if role is not post.role:
            self._check_may_become(worker_id, role)
            roster = self.roster.with_post(worker_id, Post(role))
            self._write(replace(roster, is_automatic=False, reason=f"{worker_id} was told to {role}"))
        await self._until_serves(worker_id, Post(role))

    def _check_may_become(self, worker_id: str, role: Role) -> None:
        if not self._spec.flexible:
            raise ConfigError(
                "workers of this fleet keep their roles: start it with --flexible, or with room between --min-* and "
                "--max-* of both roles",
                field="--flexible",
            )
        if self._stage(worker_id) in _GONE:
            raise PeerLost(f"{worker_id} is {self._stage(worker_id)}: only a worker that serves can switch")
        others = (name for name in self.roster.staff(Role.DECODE) if name != worker_id)
        if role is Role.PREFILL and all(self._stage(name) in _GONE for name in others):
            raise InvalidRequest(f"{worker_id} is the last decode worker: add one first", field="worker")

    async def _until_serves(self, worker_id: str, post: Post) -> None:
        def is_settled(stage: Stage) -> bool:
            serves = stage is Stage.SERVING and self._fleet.role(worker_id) is post.role
            return serves or stage in _GONE or self.roster.posts[worker_id] != post

        await self._fleet.until(worker_id, is_settled)
        if self.roster.posts[worker_id] != post:
            raise InvalidRequest(f"{worker_id} was told otherwise by somebody else", field="worker")
        if self._stage(worker_id) in _GONE:
            raise PeerLost(f"{worker_id} is {self._stage(worker_id)}: it serves in no role")

    def look(self, tasks: asyncio.TaskGroup) -> None:
        """Begin what can begin now."""
        if self._asked not in (None, self._placed()):
            self._ask_for_room()
        for worker_id, post in self.roster.posts.items():
            try:
                stage = self._fleet.stage(worker_id)
            except NotFound:
                self._fleet.add(self._spec.worker(worker_id, post.role))
                continue
            if worker_id in self._busy or (stage is Stage.SERVING and self._drains.lingers(worker_id)):
                continue
            if post.is_retiring:
                if stage is Stage.ABSENT:  # maybe it is found
                    self._ground.set_departure(worker_id, Departure.AWAY)
                elif stage is not Stage.SERVING or self._can_be_spared(worker_id):
                    self._begin(worker_id, self._retire(worker_id, tasks), tasks)
            elif self.shall_switch(worker_id) and stage is Stage.SERVING and self._can_be_spared(worker_id):
                self._begin(worker_id, self._switch(worker_id, tasks), tasks)

    def shall_switch(self, worker_id: str) -> bool:
        return self._fleet.role(worker_id) is not self.roster.posts[worker_id].role

    def _can_be_spared(self, worker_id: str) -> bool:
        """Prompts are computed without prefill workers, too; answers come of decode workers alone."""
        if self._fleet.role(worker_id) is Role.PREFILL:
            return True
        others = (name for name in self.roster.posts if name != worker_id and name not in self._busy)
        return any(self._stage(name) is Stage.SERVING and self._fleet.role(name) is Role.DECODE for name in others)

    def _stage(self, worker_id: str) -> Stage:
        """Of one that the roster has, and the fleet maybe not yet."""
        try:
            return self._fleet.stage(worker_id)
        except NotFound:
            return Stage.ABSENT

    def _begin(self, worker_id: str, work: Coroutine[None, None, None], tasks: asyncio.TaskGroup) -> None:
        self._busy.add(worker_id)
        task = tasks.create_task(work)
        task.add_done_callback(lambda _: self._end(worker_id))

    def _end(self, worker_id: str) -> None:
        self._busy.discard(worker_id)
        self._fleet.wake()

    async def _retire(self, worker_id: str, tasks: asyncio.TaskGroup) -> None:
        """Where it serves again afterwards (somebody has asked it back), the next look begins anew."""
        if self._fleet.stage(worker_id) in (Stage.SERVING, Stage.DRAINING, Stage.DRAINED):
            try:
                await self._drains.drain(worker_id, DEADLINE_S, False, tasks)
            except PeerLost as error:
                log.warning("worker does not retire yet worker=%s error=%s", worker_id, error)
                return
        else:
            await self._end_unserved(worker_id)
        await self._drains.until_over(worker_id)
        if self._fleet.stage(worker_id) not in _GONE:
            return
        self._ground.set_departure(worker_id, None)
        self._fleet.forget(worker_id)
        self._write(self.roster.without(worker_id))
        log.info("worker has retired worker=%s", worker_id)

    async def _end_unserved(self, worker_id: str) -> None:
        """Of a process that has been found, it is not known yet whether it serves: if so, it drains."""
        fleet = self._fleet
        self._ground.set_departure(worker_id, Departure.AWAY)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GREETING_S):
                await fleet.until(worker_id, lambda stage: stage not in _BEGINNING)
        if fleet.stage(worker_id) is Stage.DEAD:
            fleet.enter(worker_id, Stage.DRAINED)
        elif fleet.stage(worker_id) in _BEGINNING:
            fleet.handle(worker_id).remove()
        await fleet.until(worker_id, lambda stage: stage in _GONE or stage is Stage.SERVING)

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
            self._fleet.publish()


_GONE = frozenset({Stage.DRAINED, Stage.FAILED})
"""It will not serve by itself."""
_BEGINNING = frozenset({Stage.IDLE, Stage.STARTING})
