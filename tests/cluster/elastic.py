"""A real supervisor over real worker processes, without Ray: workers come, go, switch roles and are killed for real.

`ProcessBackend` is to the supervisor what Ray is: it starts processes, and starts them again when they die.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
import tempfile
import urllib.request
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

from cluster.supervisor.actors import ActorLocation, Serving
from cluster.supervisor.backend import AfterDrain, Nodes, WorkerDied
from cluster.supervisor.supervisor import Supervisor
from cluster.supervisor.view import FleetSnapshot, SupervisedWorker
from cluster.values.desired_state import Checkpoint, DesiredState
from cluster.values.spec import LAUNCHED_GRACE_S, fleet_spec
from cluster.values.worker_counts import WorkerCounts
from tests.cluster.forked import ROUTER_MODULES, WORKER_MODULES, ForkedProcess, fork
from tests.cluster.processes import PATIENCE_S, TOKEN
from twostroke.base import errors
from twostroke.config import ClusterConfig, ListenConfig, Role, RouterConfig, RoutingConfig, WorkerConfig

MOUNTED_MODULES: Final = (*WORKER_MODULES, "cluster.supervisor.actors")


class ProcessWorker:
    def __init__(self, config: WorkerConfig, log_path: Path) -> None:
        self._config = config
        self._log_path = log_path
        self._process: ForkedProcess | None = None
        self._starting = asyncio.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._reading: asyncio.Task[None] | None = None
        self.is_removed = False
        self.processes = 0
        """Begun so far."""

    async def place(self) -> ActorLocation:
        return ActorLocation(**await self._call("place"))

    async def run(self, incarnation: int, role: Role, checkpoint: Checkpoint) -> None:
        await self._call("run", incarnation, role.value, checkpoint.model, checkpoint.number)

    async def ready(self, incarnation: int) -> Serving:
        said = await self._call("ready", incarnation)
        return Serving(**{**said, "role": Role(said["role"]), "checkpoint": Checkpoint(**said["checkpoint"])})

    async def shutdown(self) -> None:
        await self._call("shutdown")

    async def release(self) -> None:
        await self._call("release")

    def recycle(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def remove(self) -> None:
        self.is_removed = True
        self.recycle()

    async def ended(self) -> None:
        """Waits for the process that it has, if there is one."""
        if self._process is not None:
            await self._process.wait()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def _call(self, name: str, *arguments: object) -> Any:
        async with self._starting:
            if self.is_removed:
                raise WorkerDied("it was removed")
            if self._reading is None or self._reading.done():
                await self._start()
        assert self._process is not None
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        call = {"number": number, "name": name, "arguments": arguments}
        self._process.stdin.write(json.dumps(call).encode() + b"\n")
        return await answer

    async def _start(self) -> None:
        with self._log_path.open("ab") as log_file:
            self._process = await fork(
                sys.executable, "-m", "tests.cluster.mounted", loads=MOUNTED_MODULES, stderr=log_file
            )
        self.processes += 1
        self._process.stdin.write(self._config.to_json().encode() + b"\n")
        self._reading = asyncio.create_task(self._read(self._process))

    async def _read(self, process: ForkedProcess) -> None:
        while line := await process.stdout.readline():
            answer = json.loads(line)
            future = self._waiting.pop(answer["number"])
            if future.done():
                continue
            if "error" in answer:
                future.set_exception(getattr(errors, answer["error"])(answer["message"]))
            else:
                future.set_result(answer["result"])
        await process.wait()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(WorkerDied(f"{self._config.worker_id} died"))
        self._waiting.clear()


class ProcessBackend:
    """What a supervisor has written down outlives it here, as in Ray's store."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.workers: dict[str, ProcessWorker] = {}
        self._incarnations: dict[str, int] = {}
        self._departures: dict[str, AfterDrain] = {}
        self._desired: DesiredState | None = None
        self._messages: defaultdict[str, dict[str, bytes]] = defaultdict(dict)

    def find(self, config: WorkerConfig) -> ProcessWorker | None:
        worker = self.workers.get(config.worker_id)
        return None if worker is None or worker.is_removed else worker

    def create(self, config: WorkerConfig) -> ProcessWorker:
        worker = self.workers[config.worker_id] = ProcessWorker(config, self._folder / f"{config.worker_id}.log")
        return worker

    def next_incarnation(self, worker_id: str) -> int:
        self._incarnations[worker_id] = self._incarnations.get(worker_id, 0) + 1
        return self._incarnations[worker_id]

    def after_drain(self, worker_id: str) -> AfterDrain | None:
        return self._departures.get(worker_id)

    def set_after_drain(self, worker_id: str, after_drain: AfterDrain | None) -> None:
        if after_drain is None:
            self._departures.pop(worker_id, None)
        else:
            self._departures[worker_id] = after_drain

    def desired(self) -> DesiredState | None:
        return self._desired

    def set_desired(self, desired: DesiredState) -> None:
        self._desired = desired

    def stored(self, kind: str) -> dict[str, bytes]:
        return dict(self._messages[kind])

    def store(self, kind: str, key: str, message: bytes | None) -> None:
        if message is None:
            self._messages[kind].pop(key, None)
        else:
            self._messages[kind][key] = message

    def request_nodes(self, placed: WorkerCounts) -> None:
        """There is always some."""

    async def nodes(self) -> Nodes:
        return Nodes({}, has_others=True)

    def forget(self) -> None:
        """Nothing of it outlives the test."""


class ElasticCluster:
    def __init__(self, config: ClusterConfig, folder: Path) -> None:
        self.config = config
        self.folder = folder
        self.backend = ProcessBackend(folder)
        self.grpc = self.http = ""
        self._port = 0
        self._run_task: asyncio.Task[None] | None = None
        self._router: ForkedProcess | None = None
        self.supervisor: Supervisor

    async def start(self) -> None:
        await self.start_supervisor()
        config = RouterConfig(
            listen=ListenConfig(http_port=0, grpc_port=0),
            fleet_address=await self.supervisor.address(),
            cluster_token=TOKEN,
            served_model_name=self.config.model.public_name,
            routing=RoutingConfig(policy=self.config.routing.policy, seed=7),
            drain_grace_s=LAUNCHED_GRACE_S,
        )
        with (self.folder / "router.log").open("wb") as log_file:
            self._router = await fork(sys.executable, "-m", "router", loads=ROUTER_MODULES, stderr=log_file)
        self._router.stdin.write(config.to_json().encode())
        self._router.stdin.close()
        said = json.loads(await asyncio.wait_for(self._router.stdout.readline(), PATIENCE_S))
        self.grpc, self.http = str(said["grpc"]), str(said["http"])
        await self.until(lambda workers: all(worker.observed.stage == "serving" for worker in workers.values()))
        async with asyncio.timeout(PATIENCE_S):
            while not await asyncio.to_thread(self._is_ready):
                await asyncio.sleep(0.05)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.http}/ready", timeout=60):
                return True
        except OSError:
            return False

    async def start_supervisor(self) -> None:
        """A new one on the port of the one before, which knows what that one wrote down."""
        self.supervisor = Supervisor(fleet_spec(self.config, token=TOKEN, port=self._port), self.backend)
        self._run_task = asyncio.create_task(self.supervisor.run())
        self._port = int((await self.supervisor.address()).rpartition(":")[2])

    async def kill_supervisor(self) -> None:
        """It ends between two instructions, and tells nobody."""
        assert self.supervisor._run_task is not None
        assert self._run_task is not None
        self.supervisor._run_task.cancel()
        await asyncio.gather(self._run_task, self.supervisor._run_task, return_exceptions=True)

    async def until(self, is_so: Callable[[dict[str, SupervisedWorker]], bool], within_s: float = PATIENCE_S) -> None:
        """The fleet is as it is meant to be."""
        version, seen = -1, {}
        try:
            async with asyncio.timeout(within_s):
                while True:
                    snapshot: FleetSnapshot = await self.supervisor.snapshot(version)
                    version, seen = snapshot.version, {each.config.worker_id: each for each in snapshot.workers}
                    if is_so(seen):
                        return
        except TimeoutError:
            raise AssertionError(f"not so: {[(name, each.observed.stage) for name, each in seen.items()]}") from None

    async def workers(self) -> dict[str, SupervisedWorker]:
        return {worker.config.worker_id: worker for worker in (await self.supervisor.snapshot()).workers}

    def kill(self, worker_id: str) -> None:
        os.kill(self.backend.workers[worker_id].pid, signal.SIGKILL)

    async def close(self) -> None:
        await self.supervisor.stop()
        assert self._run_task is not None
        await asyncio.gather(self._run_task, return_exceptions=True)
        if self._router is not None:
            self._router.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._router.wait(), 15)
        for worker in self.backend.workers.values():
            worker.remove()
            await worker.ended()

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()[-5000:]}" for path in sorted(self.folder.glob("*.log")))


@contextlib.asynccontextmanager
async def elastic_cluster(config: ClusterConfig) -> AsyncIterator[ElasticCluster]:
    with tempfile.TemporaryDirectory() as folder:
        cluster = ElasticCluster(config, Path(folder))
        try:
            await cluster.start()
            yield cluster
        except BaseException:
            print(cluster.logs()[-20000:])
            raise
        finally:
            await cluster.close()
