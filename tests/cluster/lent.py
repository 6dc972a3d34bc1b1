"""A cluster that several tests use: each gets it whole and quiet, with nothing cached."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import grpc.aio

from tests.cluster.processes import PATIENCE_S, SHOWN, ProcessCluster
from twostroke.rpc.v1 import control_pb2, control_pb2_grpc


@contextlib.asynccontextmanager
async def lent(cluster: ProcessCluster) -> AsyncIterator[ProcessCluster]:
    """A test that ends one of its processes starts it again."""
    yield cluster
    for name, worker in cluster.workers.items():
        assert worker.process.returncode is None, f"{name} was left dead"
    await cluster.assert_quiet()
    await forget_cached(cluster)
    for name in cluster.workers:
        load = await cluster.load(name)
        assert load.pages_free + load.pages_pinned == load.pages_total, f"{name} has not forgotten all: {load}"


async def forget_cached(cluster: ProcessCluster) -> int:
    """Returns the number of blocks that its workers have forgotten."""
    async with grpc.aio.insecure_channel(cluster.admin) as channel:
        call = control_pb2_grpc.ControlStub(channel).ForgetCached(
            control_pb2.ForgetCachedRequest(), timeout=PATIENCE_S, metadata=SHOWN
        )
        return (await call).blocks
