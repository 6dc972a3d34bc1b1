"""Adapters as a branch of a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

import grpc.aio

from twostroke.base.errors import ServeError
from twostroke.config import WorkerConfig
from twostroke.engine.adapters.slots import AdapterSlots, NoSlots
from twostroke.engine.backends.built import BuiltEngine
from twostroke.request import WeightsRef
from twostroke.rpc.server import RpcServer
from twostroke.rpc.v1 import adapters_pb2, adapters_pb2_grpc, control_pb2
from twostroke.scheduler.constraints.adapted import Adapted, with_adapter
from twostroke.scheduler.sequence import Constraint
from twostroke.worker.adapters.cache import AdapterCache, AdapterMetrics
from twostroke.worker.branches import Branch, BranchHost
from twostroke.worker.engine_state import LoadedBranch
from twostroke.worker.role_host import RoleHandlers

Context = grpc.aio.ServicerContext[object, object]


class WorkerAdaptersService(adapters_pb2_grpc.WorkerAdaptersServicer):
    def __init__(self, adapters: AdapterCache) -> None:
        self._adapters = adapters

    async def Keep(  # noqa: N802  # the name in the .proto
        self, request: adapters_pb2.KeepAdaptersRequest, context: Context
    ) -> adapters_pb2.KeepAdaptersResponse:
        self._adapters.keep_only(request.digests)
        return adapters_pb2.KeepAdaptersResponse()


class LoadedSlots(LoadedBranch):
    """The engine's slots for adapters. The cache of each epoch fills them, and empties them at its end."""

    def __init__(self, slots: AdapterSlots) -> None:
        self.slots = slots


class Adapters(Branch):
    @staticmethod
    def load(config: WorkerConfig, built: BuiltEngine) -> LoadedSlots:
        return LoadedSlots(built.offers.get(AdapterSlots, NoSlots()))

    @classmethod
    def mount(cls, host: BranchHost, loaded: LoadedBranch | None) -> Adapters | None:
        return cls(host, loaded.slots) if isinstance(loaded, LoadedSlots) else None

    def __init__(self, host: BranchHost, slots: AdapterSlots) -> None:
        super().__init__(host)
        self.cache = AdapterCache(
            slots,
            host.engine,
            host.config.adapters,
            AdapterMetrics(host.config.role.value, host.metrics.registry),
            is_awaited=lambda digest: bool(with_adapter(host.scheduler.waiting_sequences, digest)),
            wake=host.wake,
        )

    def constraints_of(self, weights: WeightsRef) -> tuple[Constraint, ...]:
        return (Adapted(weights, self.cache),)

    def serve(self, rpc: RpcServer, tasks: asyncio.TaskGroup) -> None:
        adapters_pb2_grpc.add_WorkerAdaptersServicer_to_server(WorkerAdaptersService(self.cache), rpc.server)
        rpc.offer("twostroke.v1.WorkerAdapters")

    def watching(self, handlers: RoleHandlers) -> Iterable[Callable[[], Awaitable[object]]]:
        return (partial(self.cache.run, partial(self._end, handlers)),)

    async def close(self) -> None:
        await self.cache.close()

    def add_to_load(self, load: control_pb2.Load) -> None:
        load.weights.extend(self.cache.loaded)
        load.weights_load_s = self.cache.load_s

    def _end(self, handlers: RoleHandlers, digest: bytes, error: ServeError) -> None:
        """Ends the sequences that wait for an adapter that cannot be loaded."""
        host = self.host
        sequences = with_adapter(host.scheduler.waiting_sequences, digest)
        for sequence in sequences:
            host.scheduler.end(sequence)
        handlers.failed(sequences, error)
        host.progress.notify()
        host.wake()
