"""A cluster of real processes without Ray: workers and router as users run them, and a Fleet service in the test."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.supervisor.fleet_service import FleetService
from cluster.values.spec import LAUNCHED_GRACE_S
from router.addresses import Addresses
from tests import metrics_page
from tests.cluster.forked import MODEL_MODULES, ROUTER_MODULES, WORKER_MODULES, ForkedProcess, fork
from tests.prepare import build_kernels
from tests.trials.chaos.injection.plan import ENVIRONMENT
from tests.trials.chaos.injection.process import command_of
from twostroke.base.credentials import TlsConfig
from twostroke.base.json_values import from_values
from twostroke.config import (
    PACED_PREFIX,
    CacheConfig,
    EndpointsConfig,
    ListenConfig,
    ModelConfig,
    Role,
    RouterConfig,
    RoutingConfig,
    RuntimeConfig,
    ScheduleConfig,
    TracingConfig,
    WorkerConfig,
)
from twostroke.config.output import OutputConfig
from twostroke.models.adapters.peft import Adapter
from twostroke.rpc import proof
from twostroke.rpc.channel import PeerChannel, TlsEndpoint
from twostroke.rpc.membership import Membership
from twostroke.rpc.proof import TOKEN_KEY
from twostroke.rpc.server import RpcServer
from twostroke.rpc.v1 import (
    adapters_pb2,
    control_pb2,
    control_pb2_grpc,
    fleet_pb2,
    fleet_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    worker_pb2,
)

TOKEN = "token-of-the-test-cluster"
SHOWN = ((TOKEN_KEY, TOKEN),)
"""Metadata for calls to admin ports and workers."""
PATIENCE_S = 150.0
"""Bounds every wait: a hang fails the test that hangs."""
DEADLINE_S = 180.0
"""The deadline of an answer: thirty prompts that are sent at once to a busy machine shall all be answered."""


@dataclass(slots=True)
class WorkerProcess:
    config: WorkerConfig
    process: ForkedProcess
    info: dict[str, object] = field(default_factory=dict)
    state: control_pb2.WorkerState = control_pb2.WORKER_STATE_STARTING


@dataclass(frozen=True, slots=True)
class RouterProcess:
    process: ForkedProcess
    addresses: Addresses

    @property
    def http(self) -> str:
        return self.addresses.http

    @property
    def grpc(self) -> str:
        return self.addresses.grpc


class ProcessCluster:
    """Start with `running_cluster`. Every worker is a process that can be killed, stopped and started again."""

    def __init__(
        self,
        folder: Path,
        model: ModelConfig,
        cache: CacheConfig,
        schedule: ScheduleConfig,
        policy: str,
        *,
        public_prefixes: tuple[str, ...] = (),
        request_log: Path | None = None,
        transports: tuple[str, ...] | None = None,
        endpoints: EndpointsConfig | None = None,
        output: OutputConfig | None = None,
        tracing: TracingConfig | None = None,
        tls: TlsConfig | None = None,
        cluster_tls: TlsConfig | None = None,
        fleet_port: int = 0,
        borrow: bool = True,
        prefill_module: str = "prefill_worker",
        decode_module: str = "decode_worker",
        is_plain: bool = False,
    ) -> None:
        self.folder = folder
        self.prefill_module, self.decode_module = prefill_module, decode_module
        self.borrow = borrow
        self.tls, self.cluster_tls = tls, cluster_tls
        self.us = Membership.of(TOKEN, cluster_tls)
        self.tracing = tracing or TracingConfig()
        self.endpoints = endpoints or EndpointsConfig()
        self.output = output or OutputConfig()
        self.transports = transports
        self.model, self.cache, self.schedule, self.policy = model, cache, schedule, policy
        self.public_prefixes = public_prefixes
        self.request_log = request_log
        self.workers: dict[str, WorkerProcess] = {}
        self.routers: dict[int, RouterProcess] = {}
        self._fleet = FleetService()
        self._fleet_server = RpcServer("127.0.0.1", fleet_port, token=TOKEN, certificates=self.us.certificates)
        fleet_pb2_grpc.add_FleetServicer_to_server(self._fleet, self._fleet_server.server)
        self.adapters: dict[str, adapters_pb2.NamedAdapter] = {}
        """What the fleet serves beside the model, by the names that clients call them."""
        self._version = 0
        self._proxied = contextlib.ExitStack()
        self._loads = ROUTER_MODULES + WORKER_MODULES + (() if self.is_paced else MODEL_MODULES)
        if is_plain:
            self._loads = ()
        self._processes: list[ForkedProcess] = []
        """All that ever were: a worker that is started again may have an earlier life."""

    @property
    def is_paced(self) -> bool:
        return self.model.model.startswith(PACED_PREFIX)

    @property
    def http(self) -> str:
        """The HTTP address of the first router."""
        return f"http://{self.routers[0].http}"

    @property
    def grpc(self) -> str:
        return self.routers[0].grpc

    @property
    def admin(self) -> str:
        """Calls there need TOKEN."""
        return self.routers[0].addresses.admin

    async def start(self, prefill: int, decode: int, model_dir: Path | None, routers: int = 1) -> None:
        if not self.is_paced:
            await asyncio.to_thread(build_kernels)
        if ENVIRONMENT in os.environ:  # the other processes dial the ports of proxies
            self._proxied.enter_context(mock.patch.object(proof, "check_dialled"))
        await self._fleet_server.start()
        names = [(Role.PREFILL, index) for index in range(prefill)] + [(Role.DECODE, index) for index in range(decode)]
        await asyncio.gather(
            *(self.start_router(model_dir, index) for index in range(routers)),
            *(self.start_worker(role, f"{role.value}-{index}", 1) for role, index in names),
        )
        await self._until_ready()

    async def start_router(self, model_dir: Path | None, index: int = 0, again: Addresses | None = None) -> None:
        """`again`: on the ports of an earlier life."""
        http_port, grpc_port, admin_port = (
            (0, 0, 0) if again is None else map(port_of, (again.http, again.grpc, again.admin))
        )
        config = RouterConfig(
            listen=ListenConfig(http_port=http_port, grpc_port=grpc_port),
            endpoints=self.endpoints.replace(admin_port=admin_port),
            fleet_address=self._fleet_server.address,
            cluster_token=TOKEN,
            tls=self.tls,
            cluster_tls=self.cluster_tls,
            model_dir=str(model_dir or ""),
            served_model_name=self.model.public_name,
            routing=RoutingConfig(
                policy=self.policy,
                seed=7,
                public_prefixes=self.public_prefixes,
                request_log=None if self.request_log is None else str(self.request_log),
            ),
            number=index,
            drain_grace_s=LAUNCHED_GRACE_S,
            output=self.output,
            tracing=self.tracing,
        )
        process = await self._spawn("router", config.to_json())
        addresses = await self._first_line(process)
        self.routers[index] = RouterProcess(process, from_values(Addresses, addresses))

    async def kill_router(self, index: int = 0, number: signal.Signals = signal.SIGKILL) -> None:
        process = self.routers[index].process
        process.send_signal(number)
        await asyncio.wait_for(process.wait(), PATIENCE_S)

    async def restart_router(self, index: int = 0) -> None:
        """It dies without a word, and another one knows nothing of what it knew."""
        await self.kill_router(index)
        await self.start_router(None, index)
        await self._until_ready()

    @property
    def fleet_address(self) -> str:
        return self._fleet_server.address

    async def start_worker(
        self, role: Role, worker_id: str, incarnation: int, *, module: str | None = None, **changes: object
    ) -> None:
        """`module`: another one than the role's own."""
        config = WorkerConfig(
            role=role,
            worker_id=worker_id,
            incarnation=incarnation,
            cluster_token=TOKEN,
            cluster_tls=self.cluster_tls,
            model=self.model,
            cache=self.cache,
            schedule=self.schedule,
            runtime=RuntimeConfig(transports=self.transports, borrow=self.borrow),
            tracing=self.tracing,
        )
        config = config.replace(**changes)
        module = module or (self.prefill_module if role is Role.PREFILL else self.decode_module)
        worker = WorkerProcess(config, await self._spawn(module, config.to_json()))
        self.workers[worker_id] = worker
        worker.info = await self._first_line(worker.process)
        worker.state = control_pb2.WORKER_STATE_SERVING
        self.publish()

    async def kill(self, worker_id: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Kills a worker and tells the fleet, as the supervisor does."""
        worker = self.workers[worker_id]
        worker.process.send_signal(number)
        await asyncio.wait_for(worker.process.wait(), PATIENCE_S)
        worker.state = control_pb2.WORKER_STATE_DEAD
        self.publish()

    async def restart(self, worker_id: str) -> None:
        config = self.workers[worker_id].config
        await self.start_worker(config.role, worker_id, config.incarnation + 1)

    def publish(self) -> None:
        self._version += 1
        workers = [
            fleet_pb2.WorkerEntry(
                worker_id=name,
                role=worker.config.role.value,
                address=str(worker.info.get("address", "")),
                epoch=str(worker.info.get("epoch", "")),
                state=worker.state,
                metrics_address=str(worker.info.get("metrics_address", "")),
            )
            for name, worker in self.workers.items()
        ]
        adapters = list(self.adapters.values())
        self._fleet.publish(fleet_pb2.FleetView(version=self._version, workers=workers, adapters=adapters))

    async def name_adapter(self, name: str, adapter: Adapter, folder: Path) -> None:
        """Serves what is in a folder, as the supervisor does; returns once the router does."""
        named = worker_pb2.Weights(digest=adapter.digest, path=str(folder))
        self.adapters[name] = adapters_pb2.NamedAdapter(name=name, adapter=named, lora_rank=adapter.lora_rank)
        self.publish()
        async with asyncio.timeout(PATIENCE_S):
            while name not in await asyncio.to_thread(self._served_models):
                await asyncio.sleep(0.02)

    def _served_models(self) -> list[str]:
        with urllib.request.urlopen(f"{self.http}/v1/models", timeout=PATIENCE_S) as answer:
            return [card["id"] for card in json.load(answer)["data"]]

    async def load(self, worker_id: str) -> control_pb2.Load:
        channel = PeerChannel(str(self.workers[worker_id].info["address"]), self.us)
        try:
            stub = control_pb2_grpc.ControlStub(channel.channel)
            answer = await stub.GetLoad(control_pb2.GetLoadRequest(), metadata=channel.metadata, timeout=PATIENCE_S)
            return answer.workers[0].load
        finally:
            await channel.close()

    async def assert_quiet(self) -> None:
        """Every page of every living worker is free or cached, and nothing waits or runs; soon, if not at once."""
        for name, worker in self.workers.items():
            if worker.state != control_pb2.WORKER_STATE_SERVING:
                continue
            for _ in range(600):
                load = await self.load(name)
                busy = (load.pages_active, load.pages_arriving, load.pages_quarantined, load.running, load.waiting)
                if not any(busy):
                    break
                await asyncio.sleep(0.1)
            assert not any(busy), f"{name} still holds something: {load}"
            assert load.pages_free + load.pages_cached + load.pages_pinned == load.pages_total

    async def close(self) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.send_signal(signal.SIGCONT)
                process.send_signal(signal.SIGTERM)
        for process in self._processes:
            try:
                await asyncio.wait_for(process.wait(), 15)
            except TimeoutError:
                process.kill()
                await process.wait()
        await self._fleet_server.stop(0)
        self._proxied.close()

    def metric(self, worker_id: str, name: str) -> float:
        """The sum over all series of one metric of a worker."""
        return metrics_page.total(str(self.workers[worker_id].info["metrics_address"]), name)

    async def _spawn(self, module: str, config: str) -> ForkedProcess:
        log_file = (self.folder / f"{module}-{len(self.workers)}-{os.urandom(2).hex()}.log").open("wb")
        process = await fork(*command_of(module), loads=self._loads, stderr=log_file)
        log_file.close()
        self._processes.append(process)
        process.stdin.write(config.encode())
        process.stdin.close()
        return process

    async def _first_line(self, process: ForkedProcess) -> dict[str, object]:
        line = await asyncio.wait_for(process.stdout.readline(), PATIENCE_S)
        assert line, f"a process ended before it was ready; logs:\n{self.logs(last=4000)}"
        said: dict[str, object] = json.loads(line)
        return said

    def logs(self, *, last: int = 1 << 30) -> str:
        """What every process has logged: `last` characters of each at most."""
        return "\n".join(f"== {path.name}\n{path.read_text()[-last:]}" for path in sorted(self.folder.glob("*.log")))

    async def _until_ready(self) -> None:
        for router in self.routers.values():
            await self._until_router_ready(router)

    async def _until_router_ready(self, router: RouterProcess) -> None:
        async with asyncio.timeout(PATIENCE_S):
            async with grpc.aio.insecure_channel(router.addresses.admin) as channel:
                stub = control_pb2_grpc.ControlStub(channel)
                health = health_pb2_grpc.HealthStub(channel)
                while True:
                    try:
                        loads = await stub.GetLoad(control_pb2.GetLoadRequest(), metadata=SHOWN)
                        ready = await health.Check(health_pb2.HealthCheckRequest(service="ready"))
                        have_reported = [bool(each.load.state) for each in loads.workers]
                        if have_reported == [True] * len(self.workers) and ready.status == ready.SERVING:
                            return
                    except grpc.aio.AioRpcError:
                        pass
                    await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def running_cluster(
    *,
    prefill: int,
    decode: int,
    model: ModelConfig,
    model_dir: Path | None = None,
    cache: CacheConfig | None = None,
    schedule: ScheduleConfig | None = None,
    policy: str = "kv",
    public_prefixes: tuple[str, ...] = (),
    request_log: Path | None = None,
    routers: int = 1,
    transports: tuple[str, ...] | None = None,
    endpoints: EndpointsConfig | None = None,
    output: OutputConfig | None = None,
    tracing: TracingConfig | None = None,
    fleet_port: int = 0,
    tls: TlsConfig | None = None,
    cluster_tls: TlsConfig | None = None,
    borrow: bool = True,
    prefill_module: str = "prefill_worker",
    decode_module: str = "decode_worker",
    is_plain: bool = False,
) -> AsyncIterator[ProcessCluster]:
    """A ready cluster; at the end every worker that still lives is proved quiet, and all processes are gone.

    `is_plain`: its processes have the command lines that users see.
    """
    with tempfile.TemporaryDirectory() as folder:
        cluster = ProcessCluster(
            Path(folder),
            model,
            cache or CacheConfig(kv_cache_memory_bytes=256 << 20),
            schedule or ScheduleConfig(),
            policy,
            public_prefixes=public_prefixes,
            request_log=request_log,
            transports=transports,
            endpoints=endpoints,
            output=output,
            tracing=tracing,
            fleet_port=fleet_port,
            tls=tls,
            cluster_tls=cluster_tls,
            borrow=borrow,
            prefill_module=prefill_module,
            decode_module=decode_module,
            is_plain=is_plain,
        )
        try:
            await cluster.start(prefill, decode, model_dir, routers)
            yield cluster
            await cluster.assert_quiet()
        except BaseException:
            print(cluster.logs(last=8000))
            raise
        finally:
            await cluster.close()


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


class Client:
    """A gRPC client of the front door that speaks token ids."""

    def __init__(self, address: str, endpoint: TlsEndpoint | None = None) -> None:
        """`endpoint`: where it takes TLS."""
        self.channel = (
            grpc.aio.insecure_channel(address)
            if endpoint is None
            else grpc.aio.secure_channel(address, endpoint.credentials, options=list(endpoint.options))
        )
        self.stub = inference_pb2_grpc.InferenceStub(self.channel)

    async def close(self) -> None:
        await self.channel.close()

    def stream(self, prompt: Sequence[int], **options: object) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Responses to one request; options: max_tokens, temperature, seed, n, top_p, ignore_eos, ..."""
        return self.stub.Generate(generate_request(prompt, **options), timeout=DEADLINE_S).__aiter__()

    async def tokens(self, prompt: Sequence[int], **options: object) -> list[int]:
        """The whole answer of choice 0."""
        return [token async for response in self.stream(prompt, **options) for token in response.token_ids]


def generate_request(prompt: Sequence[int], **options: object) -> inference_pb2.GenerateRequest:
    stop_fields = {"max_tokens", "min_tokens", "ignore_eos", "stop", "stop_token_ids"}
    request_fields = {
        "n",
        "request_id",
        "cache_salt",
        "model",
        "priority",
        "tenant",
        "kv_exactness",
        "speculation",
        "structured_output",
    }
    stop = {key: value for key, value in options.items() if key in stop_fields}
    outer = {key: value for key, value in options.items() if key in request_fields}
    sampling = {key: value for key, value in options.items() if key not in stop_fields | request_fields}
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=prompt),
        sampling=inference_pb2.SamplingOptions(**sampling),  # type: ignore[arg-type]  # checked by protobuf
        stop=inference_pb2.StopOptions(**stop),  # type: ignore[arg-type]
        **outer,  # type: ignore[arg-type]
    )
