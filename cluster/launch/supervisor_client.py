"""The launcher's connection to the supervisor: calls it, reconnects after its death, and prints what it reports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import ray.exceptions

from cluster.ray import session as ray_session
from cluster.routers.process import tail_of
from cluster.supervisor.reconcile.plan import WorkerStage, backoff_s
from cluster.supervisor.view import FleetSnapshot, SupervisedWorker
from cluster.supervisor.worker_process import SHUTDOWN_S
from cluster.terminal.activity import Activity
from cluster.terminal.announce import Announcer
from cluster.values.exits import ProcessExit
from twostroke.base.errors import ConfigError, PeerLost, ServeError

CRASHES_TO_GIVE_UP = 3
"""Crashes of a worker that never served before the start is given up."""
RETRY_S = 0.2
STARTING_S = 1.0
"""Longest time between two looks at a fleet that starts, so that its activities are shown."""
QUIET_S = 10.0
"""Longest time between two looks at a fleet once all workers serve. A change of the fleet is reported at once."""
REJOIN_S = 1.0
STOP_S = SHUTDOWN_S + 10.0
"""Seconds for the supervisor to end its workers, on a busy machine; it kills each one after `SHUTDOWN_S`."""
AWAY = "Ray's node of this host is away; try again when it is back"


class SupervisorClient:
    def __init__(self, supervisor: Any, announcer: Announcer, address: str | None = None) -> None:
        """`address`: a Ray cluster that was joined, and is joined again when its node on this host ends."""
        self._supervisor = supervisor
        self._announcer = announcer
        self._address = address
        self._node_ended = asyncio.Event()
        self._known: dict[str, SupervisedWorker] = {}
        self._all_serve = asyncio.Event()
        self._activities: dict[str, Activity] = {}
        """Activities of workers that do not serve yet."""
        self._advice: set[str] = set()
        """Advice that was printed already; most workers give the same."""
        self._is_gone = False
        self._is_restarting = False
        self._starts = 1
        """How often the supervisor was started."""

    async def follow(self) -> None:
        """Follows the fleet. This ends only by failure: that of the fleet, or because another command took it down."""
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
        if self._address is None:  # a local node ends this process with it
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
        self._starts += 1
        self._announcer.say("joined Ray again")

    async def _keep_supervisor(self) -> None:
        try:
            while not await self._has_ended():
                if self._is_restarting:
                    self._announcer.say("the supervisor is being restarted")
                else:
                    self._announcer.warn("the supervisor died; Ray starts it again, and it finds its workers")
                await ray_session.wait_until_alive(self._supervisor)
                self._starts += 1
        except ray.exceptions.RayActorError:
            pass  # Ray does not start it again
        self._is_gone = True
        raise PeerLost("the fleet was taken down by somebody else")

    async def _has_ended(self) -> bool:
        """Awaits the end of the supervisor's run: True once it was told to stop, False if it died."""
        try:
            await self._supervisor.run.remote()
        except ray.exceptions.RayTaskError as error:
            raise _cause(error) from None
        except ray.exceptions.RayActorError:
            return False
        return True

    async def fleet_address(self) -> str:
        return str(await self.ask("address", retries=-1))

    async def workers(self) -> list[str]:
        """Returns the names of all workers that are not asleep."""
        snapshot: FleetSnapshot = await self.ask("snapshot")
        awake = (worker for worker in snapshot.workers if worker.observed.stage is not WorkerStage.ASLEEP)
        return [worker.config.worker_id for worker in awake]

    async def ask(self, method: str, *, retries: int = 0, **arguments: Any) -> Any:
        """Calls a method of `Supervisor`. Raises PeerLost where the supervisor dies meanwhile, or Ray is away."""
        if self._supervisor is None:
            raise PeerLost(AWAY)
        called = getattr(self._supervisor, method).options(max_task_retries=retries)
        answer = asyncio.ensure_future(called.remote(**arguments))
        ended = asyncio.create_task(self._node_ended.wait())
        try:
            await asyncio.wait((answer, ended), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise PeerLost("Ray's node of this host has ended meanwhile; the fleet continues with what it began")
            return answer.result()
        except ray.exceptions.RayTaskError as error:
            raise _cause(error) from None
        except ray.exceptions.RayActorError as error:
            raise PeerLost("the supervisor died; restarted, it continues with what it began") from error
        finally:
            answer.cancel()
            ended.cancel()

    async def restart_supervisor(self) -> None:
        """Returns when the restarted supervisor has found all workers that served before."""
        before, self._is_restarting = self._starts, True
        served = {name for name, worker in self._known.items() if worker.observed.stage is WorkerStage.SERVING}
        try:
            if self._supervisor is None:
                raise PeerLost(AWAY)
            ray_session.restart(self._supervisor)
            while self._starts == before or not await self._has_found(served):  # noqa: ASYNC110  # of another process
                await asyncio.sleep(RETRY_S)
        finally:
            self._is_restarting = False

    async def _has_found(self, names: Collection[str]) -> bool:
        try:
            snapshot: FleetSnapshot = await self.ask("snapshot")
        except PeerLost:
            return False
        settled = (WorkerStage.SERVING, WorkerStage.ASLEEP, WorkerStage.DRAINED, WorkerStage.FAILED)
        return all(worker.observed.stage in settled for worker in snapshot.workers if worker.config.worker_id in names)

    async def until_all_serve(self) -> None:
        await self._all_serve.wait()

    async def _follow_fleet(self) -> None:
        """Prints every change. A worker that cannot start ends the start."""
        version = -1
        while True:
            try:
                timeout_s = QUIET_S if self._all_serve.is_set() else STARTING_S
                snapshot: FleetSnapshot = await self._supervisor.snapshot.remote(version, timeout_s)
            except ray.exceptions.RayActorError:
                version = -1
                await asyncio.sleep(RETRY_S)
                continue
            version = snapshot.version
            for worker in snapshot.workers:
                self._report(worker)
            self._report_activities(snapshot.workers)
            at_rest = (WorkerStage.SERVING, WorkerStage.ASLEEP, WorkerStage.DRAINED)
            if all(worker.observed.stage in at_rest for worker in snapshot.workers):
                self._all_serve.set()

    def _report_activities(self, workers: Sequence[SupervisedWorker]) -> None:
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

    async def stop_fleet(self) -> Sequence[ProcessExit]:
        """Stops the workers, then the supervisor, within `STOP_S`; returns how each ended."""
        if self._is_gone:
            return ()
        if self._supervisor is None:
            self._announcer.warn(
                f"the fleet continues: Ray is away; end it later with: twostroke down --address {self._address}"
            )
            return ()
        stopped_s = time.monotonic()
        try:
            return tuple(await asyncio.wait_for(self._supervisor.stop.remote(), STOP_S))
        except (TimeoutError, ray.exceptions.RayError) as error:
            after_s = time.monotonic() - stopped_s
            why = "has not answered" if isinstance(error, TimeoutError) else "died"
            self._announcer.warn(f"the supervisor {why} {after_s:.1f} s after it was told to stop its workers")
            killed = ["supervisor", *ray_session.remove_workers(list(self._known))]
            return [ProcessExit(name, after_s, is_own=name not in killed) for name in ("supervisor", *self._known)]
        finally:
            ray_session.remove(self._supervisor)

    def _report(self, worker: SupervisedWorker) -> None:
        worker_id, observed = worker.config.worker_id, worker.observed
        known = self._known.get(worker_id)
        self._known[worker_id] = worker
        if observed.stage is WorkerStage.FAILED:
            assert worker.last_error is not None
            if self._all_serve.is_set():  # an added worker; the others continue serving
                self._announcer.warn(f"{worker_id} cannot start: {worker.last_error.message}")
                return
            raise type(worker.last_error)(f"{worker_id}: {worker.last_error.message}", field=worker.last_error.field)
        if observed.stage is WorkerStage.SERVING and (known is None or known.serving != worker.serving):
            assert worker.serving is not None
            serving = worker.serving
            pool = f"pages for {serving.pool_tokens:,} tokens in {serving.pool_bytes / (1 << 20):,.0f} MiB"
            self._announcer.say(f"{worker_id} serves at {serving.address} (epoch {serving.epoch}): {pool}")
            if worker.serving.advice and worker.serving.advice not in self._advice:
                self._advice.add(worker.serving.advice)
                self._announcer.warn(worker.serving.advice)
        if known is not None and observed.stage is not known.observed.stage:
            if observed.stage is WorkerStage.DRAINING:
                self._announcer.say(f"{worker_id} drains")
            elif observed.stage is WorkerStage.DRAINED:
                self._announcer.say(f"{worker_id} has left")
            elif observed.stage is WorkerStage.ASLEEP:
                self._announcer.say(f"{worker_id} is asleep")
        if observed.crashes and (known is None or observed.crashed_s != known.observed.crashed_s):
            self._report_crash(worker)

    def _report_crash(self, worker: SupervisedWorker) -> None:
        log_path = Path(worker.place.log_path) if worker.place else None
        tail = tail_of(log_path) if log_path and log_path.exists() else "    (its log is on its own machine)"
        happened = f"{worker.config.worker_id} died: {worker.last_error}\n{tail}"
        is_start = not self._all_serve.is_set()
        if is_start and worker.observed.crashes >= CRASHES_TO_GIVE_UP and not worker.observed.has_served:
            raise ConfigError(f"given up after {worker.observed.crashes} tries: {happened}")
        self._announcer.warn(f"{happened}\n    it is started again in {backoff_s(worker.observed.crashes):.1f} s")


def _doing(worker: SupervisedWorker) -> str | None:
    """Returns what a starting worker is busy with; None for one that serves or has left."""
    stage = worker.observed.stage
    if stage in (WorkerStage.SERVING, WorkerStage.DRAINING, WorkerStage.ASLEEP, WorkerStage.DRAINED):
        return None
    if stage in (WorkerStage.DEAD, WorkerStage.FAILED):
        return "waiting to be started again"
    if worker.place is None or stage is not WorkerStage.STARTING:
        return "waiting for a process"
    if worker.config.model.is_paced:
        return "starting"
    return "loading the model (the first start on a machine also compiles kernels)"


def _cause(error: ray.exceptions.RayTaskError) -> Exception:
    cause = error.cause
    return cause if isinstance(cause, ServeError) else error
