"""The launcher's side of the supervisor: calls it, calls it again after its death, and tells people what it says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import ray.exceptions

from cluster import ray_session
from cluster.activity import Activity
from cluster.announce import Announcer
from cluster.endings import Ending
from cluster.plan import Stage, backoff_s
from cluster.router_process import tail_of
from cluster.supervisor import SHUTDOWN_S
from cluster.view import Snapshot, Worker
from twostroke.errors import ConfigError, PeerLost, ServeError

CRASHES_TO_GIVE_UP = 3
"""A worker that died this often without ever having served will not serve by trying again."""
RETRY_S = 0.2
REJOIN_S = 1.0
STOP_S = SHUTDOWN_S + 10.0
"""For the supervisor to end its workers, each of which it kills after `SHUTDOWN_S`, on a machine that is busy."""
AWAY = "Ray's node of this host is away; try again when it is back"


class Attendant:
    def __init__(self, supervisor: Any, announcer: Announcer, address: str | None = None) -> None:
        """`address`: of a Ray that was joined, and is joined again where its node of this host ends; routers go on."""
        self._supervisor = supervisor
        self._announcer = announcer
        self._address = address
        self._node_ended = asyncio.Event()
        self._known: dict[str, Worker] = {}
        self._all_serve = asyncio.Event()
        self._activities: dict[str, Activity] = {}
        """Of workers that do not serve yet."""
        self._advice: set[str] = set()
        """That was given already: most workers say the same."""
        self._is_gone = False
        self._is_restarting = False
        self._lives = 1
        """Of the supervisor."""

    async def attend(self) -> None:
        """Ends only by failure: the fleet's own, or because somebody else took it down."""
        while True:
            ended = asyncio.create_task(self._until_node_ends())
            tasks = (ended, asyncio.create_task(self._keep_supervisor()), asyncio.create_task(self._follow_fleet()))
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if not ended.done():
                    await asyncio.gather(*(task for task in tasks if task.done()))
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            await self._join_again()

    async def _until_node_ends(self) -> None:
        if self._address is None:  # ours: it ends us
            await asyncio.Event().wait()
        await ray_session.until_node_ends()
        self._node_ended.set()

    async def _join_again(self) -> None:
        assert self._address is not None, "only what was joined"
        self._announcer.warn("Ray's node of this host has ended; joining Ray again as soon as it is back")
        self._supervisor = None
        while self._supervisor is None:
            try:
                self._supervisor = await asyncio.to_thread(ray_session.rejoin, self._address)
            except ConfigError as error:
                self._announcer.say_once(f"not yet: {error.message}")
                await asyncio.sleep(REJOIN_S)
            except PeerLost:
                self._is_gone = True
                raise
        self._node_ended = asyncio.Event()
        self._lives += 1
        self._announcer.say("joined Ray again")

    async def _keep_supervisor(self) -> None:
        try:
            while not await self._has_ended():
                if self._is_restarting:
                    self._announcer.say("the supervisor begins another life")
                else:
                    self._announcer.warn("the supervisor died; Ray starts it again, and it finds its workers")
                await ray_session.wait_until_alive(self._supervisor)
                self._lives += 1
        except ray.exceptions.RayActorError:
            pass  # for good: Ray does not start it again
        self._is_gone = True
        raise PeerLost("the fleet was taken down by somebody else")

    async def _has_ended(self) -> bool:
        """Watches one life of the supervisor: True once it was told to stop, False if it died."""
        try:
            await self._supervisor.run.remote()
        except ray.exceptions.RayTaskError as error:
            raise _cause(error) from None
        except ray.exceptions.RayActorError:
            return False
        return True

    async def fleet_address(self) -> str:
        return str(await self._ask("address", retries=-1))

    async def workers(self) -> list[str]:
        snapshot: Snapshot = await self._ask("snapshot")
        return [worker.config.worker_id for worker in snapshot.workers]

    async def drain(self, **wanted: Any) -> int:
        """See `Supervisor.drain`."""
        return int(await self._ask("drain", **wanted))

    async def assign_role(self, worker_id: str, role: str) -> None:
        """See `Supervisor.assign_role`."""
        await self._ask("assign_role", worker_id=worker_id, role=role)

    async def scale(self, **wanted: Any) -> Any:
        """See `Supervisor.scale`."""
        return await self._ask("scale", **wanted)

    async def scaling(self) -> Any:
        """See `Supervisor.scaling`."""
        return await self._ask("scaling")

    async def _ask(self, method: str, *, retries: int = 0, **arguments: Any) -> Any:
        """Raises PeerLost where the supervisor dies meanwhile, or Ray is away."""
        if self._supervisor is None:
            raise PeerLost(AWAY)
        called = getattr(self._supervisor, method).options(max_task_retries=retries)
        answer = asyncio.ensure_future(called.remote(**arguments))
        ended = asyncio.create_task(self._node_ended.wait())
        try:
            await asyncio.wait((answer, ended), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise PeerLost("Ray's node of this host has ended meanwhile; the fleet goes on with what it had begun")
            return answer.result()
        except ray.exceptions.RayTaskError as error:
            raise _cause(error) from None
        except ray.exceptions.RayActorError as error:
            raise PeerLost("the supervisor died; its next life goes on with what it had begun") from error
        finally:
            answer.cancel()
            ended.cancel()

    async def restart_supervisor(self) -> None:
        """Returns when its next life has found all workers that served; others may wait for room as before."""
        before, self._is_restarting = self._lives, True
        served = {name for name, worker in self._known.items() if worker.observed.stage is Stage.SERVING}
        try:
            if self._supervisor is None:
                raise PeerLost(AWAY)
            ray_session.restart(self._supervisor)
            while self._lives == before or not await self._has_found(served):  # noqa: ASYNC110  # of another process
                await asyncio.sleep(RETRY_S)
        finally:
            self._is_restarting = False

    async def _has_found(self, names: Collection[str]) -> bool:
        try:
            snapshot: Snapshot = await self._ask("snapshot")
        except PeerLost:
            return False
        settled = (Stage.SERVING, Stage.DRAINED, Stage.FAILED)
        return all(worker.observed.stage in settled for worker in snapshot.workers if worker.config.worker_id in names)

    async def until_all_serve(self) -> None:
        await self._all_serve.wait()

    async def _follow_fleet(self) -> None:
        """Tell what changes. A worker that cannot start is the end of the start."""
        version = -1
        while True:
            try:
                snapshot: Snapshot = await self._supervisor.snapshot.remote(version)
            except ray.exceptions.RayActorError:
                version = -1
                await asyncio.sleep(RETRY_S)
                continue
            version = snapshot.version
            for worker in snapshot.workers:
                self._tell(worker)
            self._tell_activities(snapshot.workers)
            if all(worker.observed.stage in (Stage.SERVING, Stage.DRAINED) for worker in snapshot.workers):
                self._all_serve.set()

    def _tell_activities(self, workers: Sequence[Worker]) -> None:
        if self._all_serve.is_set():
            return
        before, now_s = self._activities, time.monotonic()
        self._activities = {}
        for worker in workers:
            name, doing = worker.config.worker_id, _doing(worker)
            if doing is None:
                continue
            known = before.get(name)
            since_s = known.since_s if known is not None and known.doing == doing else now_s
            self._activities[name] = Activity(name, doing, since_s)
        self._announcer.detail(tuple(self._activities.values()))

    async def stop_fleet(self) -> Sequence[Ending]:
        """Workers end, then the supervisor, within `STOP_S`. How each of them ended."""
        if self._is_gone:
            return ()
        if self._supervisor is None:
            self._announcer.warn(
                f"the fleet goes on: Ray is away; end it later with: twostroke down --address {self._address}"
            )
            return ()
        told_s = time.monotonic()
        try:
            return tuple(await asyncio.wait_for(self._supervisor.stop.remote(), STOP_S))
        except (TimeoutError, ray.exceptions.RayError) as error:
            after_s = time.monotonic() - told_s
            why = "has not answered" if isinstance(error, TimeoutError) else "died"
            self._announcer.warn(f"the supervisor {why} {after_s:.1f} s after it was told to stop its workers")
            killed = ["supervisor", *ray_session.remove_workers(list(self._known))]
            return [Ending(name, after_s, is_own=name not in killed) for name in ("supervisor", *self._known)]
        finally:
            ray_session.remove(self._supervisor)

    def _tell(self, worker: Worker) -> None:
        worker_id, observed = worker.config.worker_id, worker.observed
        known = self._known.get(worker_id)
        self._known[worker_id] = worker
        if observed.stage is Stage.FAILED:
            assert worker.last_error is not None
            if self._all_serve.is_set():  # one that was added: those that serve go on
                self._announcer.warn(f"{worker_id} cannot start: {worker.last_error.message}")
                return
            raise type(worker.last_error)(f"{worker_id}: {worker.last_error.message}", field=worker.last_error.field)
        if observed.stage is Stage.SERVING and (known is None or known.serving != worker.serving):
            assert worker.serving is not None
            self._announcer.say(f"{worker_id} serves at {worker.serving.address} (epoch {worker.serving.epoch})")
            if worker.serving.advice and worker.serving.advice not in self._advice:
                self._advice.add(worker.serving.advice)
                self._announcer.warn(worker.serving.advice)
        if known is not None and observed.stage is not known.observed.stage:
            if observed.stage is Stage.DRAINING:
                self._announcer.say(f"{worker_id} drains")
            elif observed.stage is Stage.DRAINED:
                self._announcer.say(f"{worker_id} has left")
        if observed.crashes > (known.observed.crashes if known else 0):
            self._tell_crash(worker)

    def _tell_crash(self, worker: Worker) -> None:
        log_path = Path(worker.place.log_path) if worker.place else None
        tail = tail_of(log_path) if log_path and log_path.exists() else "    (its log is on its own machine)"
        happened = f"{worker.config.worker_id} died: {worker.last_error}\n{tail}"
        is_start = not self._all_serve.is_set()
        if is_start and worker.observed.crashes >= CRASHES_TO_GIVE_UP and not worker.observed.has_served:
            raise ConfigError(f"given up after {worker.observed.crashes} tries: {happened}")
        self._announcer.warn(f"{happened}\n    it is started again in {backoff_s(worker.observed.crashes):.1f} s")


def _doing(worker: Worker) -> str | None:
    """What a worker that starts is busy with; None for one that serves, or has left."""
    stage = worker.observed.stage
    if stage in (Stage.SERVING, Stage.DRAINING, Stage.DRAINED):
        return None
    if stage in (Stage.DEAD, Stage.FAILED):
        return "waiting to be started again"
    if worker.place is None or stage is not Stage.STARTING:
        return "waiting for a process"
    if worker.config.model.is_paced:
        return "starting"
    return "loading the model (the first start on a machine also compiles kernels)"


def _cause(error: ray.exceptions.RayTaskError) -> Exception:
    cause = error.cause
    return cause if isinstance(cause, ServeError) else error
