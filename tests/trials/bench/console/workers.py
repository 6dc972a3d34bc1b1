"""Workers that compute nothing, many in one process: `python -m tests.trials.bench.console.workers COUNT`.

Each is a gRPC server of its own with its own epoch and event log. It reports its load as often as workers do. A decode
worker answers with all tokens at once, and stores the prompt's blocks. The cluster's token is read from stdin; one
line of JSON on stdout lists the workers. It ends when stdin is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import resource
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from tests.trials.bench.decisions.measure import COSTS
from twostroke.base.ids import BlockHash, Epoch, WorkerId
from twostroke.config import Role
from twostroke.config.routing import PatienceConfig
from twostroke.kv_cache.events import EventLog
from twostroke.rpc.events import batch_to_message
from twostroke.rpc.proof import TOKEN_KEY
from twostroke.rpc.v1 import control_pb2, worker_pb2

Context = grpc.aio.ServicerContext[Any, Any]
HASH_BYTES = 16
LINKS = 4
"""Peers that a worker has measured its link to."""
MOST_MODEL_TOKENS = 4096
HEARTBEAT_S = PatienceConfig().heartbeat_s


class IdleWorker:
    """It has the methods that routers call of workers without trouble."""

    def __init__(self, worker_id: WorkerId, role: Role, token: str, load: control_pb2.Load) -> None:
        self.worker_id, self.role = worker_id, role
        self.epoch = Epoch.begin(1)
        self._token = token
        self._load = load
        self._log = EventLog(self.epoch)
        self._stored: set[BlockHash] = set()
        self._streams: dict[str, asyncio.Queue[worker_pb2.TokenBatch]] = {}
        self._answers = 0
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers(self._handlers())
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    async def start(self) -> None:
        await self._server.start()

    def _handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        control = {
            "GetServerInfo": _unary(self._server_info, control_pb2.GetServerInfoRequest),
            "GetModelInfo": _unary(self._model_info, control_pb2.GetModelInfoRequest),
            "SubscribeKvEvents": _stream(self._events, control_pb2.SubscribeKvEventsRequest),
        }
        decode = {
            "Open": _unary(self._open, worker_pb2.OpenRequest),
            "Close": _unary(self._close, worker_pb2.CloseRequest),
            "Tokens": _stream(self._tokens, worker_pb2.TokensRequest),
        }
        return (
            grpc.method_handlers_generic_handler("twostroke.v1.Control", control),
            grpc.method_handlers_generic_handler("twostroke.v1.Decode", decode),
        )

    async def _server_info(self, request: control_pb2.GetServerInfoRequest, context: Context) -> control_pb2.ServerInfo:
        assert dict(context.invocation_metadata() or ())[TOKEN_KEY] == self._token
        return control_pb2.ServerInfo(
            server_id=self.worker_id, role=self.role.value, epoch=str(self.epoch), fingerprint="idle/1"
        )

    async def _model_info(self, request: control_pb2.GetModelInfoRequest, context: Context) -> control_pb2.ModelInfo:
        return control_pb2.ModelInfo(
            model="idle",
            max_model_len=MOST_MODEL_TOKENS,
            vocab_size=50_000,
            block_size=16,
            page_bytes=1 << 20,
            pool_pages=20_000,
            kv_format="bfloat16",
        )

    async def _events(
        self, request: control_pb2.SubscribeKvEventsRequest, context: Context
    ) -> AsyncIterator[control_pb2.KvEventBatch]:
        batch = self._log.snapshot()
        while True:
            message = batch_to_message(self.worker_id, self.epoch, batch)
            message.load.CopyFrom(self._load)
            yield message
            await asyncio.sleep(HEARTBEAT_S)
            batch = self._log.publish(time.time())

    async def _open(self, request: worker_pb2.OpenRequest, context: Context) -> worker_pb2.OpenResponse:
        for start in range(0, len(request.block_hashes), HASH_BYTES):
            block = BlockHash(request.block_hashes[start : start + HASH_BYTES])
            if block not in self._stored:
                self._stored.add(block)
                self._log.stored(block)
        self._answers += 1
        entry = worker_pb2.TokenEntry(
            request_id=request.request_id,
            attempt=request.attempt,
            number=self._answers,
            tokens=[worker_pb2.Token(id=97)] * request.request.sampling.max_tokens,
            finish_reason="length",
            lifetime={"admitted": time.time()},
        )
        self._streams[request.router_id].put_nowait(worker_pb2.TokenBatch(entries=[entry]))
        return worker_pb2.OpenResponse()

    async def _close(self, request: worker_pb2.CloseRequest, context: Context) -> worker_pb2.CloseResponse:
        return worker_pb2.CloseResponse()

    async def _tokens(
        self, request: worker_pb2.TokensRequest, context: Context
    ) -> AsyncIterator[worker_pb2.TokenBatch]:
        stream: asyncio.Queue[worker_pb2.TokenBatch] = asyncio.Queue()
        self._streams[request.router_id] = stream
        batch = worker_pb2.TokenBatch()
        while True:
            yield batch
            batch = worker_pb2.TokenBatch()
            with contextlib.suppress(TimeoutError):
                batch = await asyncio.wait_for(stream.get(), HEARTBEAT_S)


def _bytes_of(message: Message) -> bytes:
    return message.SerializeToString()


def _unary(method: Callable[..., object], request: type[Message]) -> grpc.RpcMethodHandler[Any, Any]:
    return grpc.unary_unary_rpc_method_handler(method, request.FromString, _bytes_of)


def _stream(method: Callable[..., object], request: type[Message]) -> grpc.RpcMethodHandler[Any, Any]:
    return grpc.unary_stream_rpc_method_handler(method, request.FromString, _bytes_of)


def idle_workers(count: int, token: str) -> list[IdleWorker]:
    """Returns workers by turns of each role, with loads that are drawn."""
    draws = random.Random("loads")
    roles = (Role.PREFILL, Role.DECODE)
    names = [WorkerId(f"{roles[number % 2].value}-{number // 2}") for number in range(count)]
    return [IdleWorker(name, roles[number % 2], token, _load(draws, names)) for number, name in enumerate(names)]


def _load(draws: random.Random, names: list[WorkerId]) -> control_pb2.Load:
    links = [
        control_pb2.LinkRate(worker_id=peer, latency_s=0.002, bytes_per_s=draws.uniform(1e9, 1e10))
        for peer in draws.choices(names[::2], k=LINKS)
    ]
    active = draws.randrange(3000)
    return control_pb2.Load(
        running=draws.randrange(30),
        queued_s=draws.expovariate(2.0),
        queued_tokens=draws.randrange(20_000),
        pages_total=20_000,
        pages_free=17_000,
        pages_cached=3000 - active,
        pages_active=active,
        slots=64,
        max_waiting=1024,
        state=control_pb2.WORKER_STATE_SERVING,
        seconds_per_step=0.02,
        costs=COSTS,
        links=links,
    )


async def _serve(count: int) -> None:
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    workers = idle_workers(count, sys.stdin.readline().strip())
    for worker in workers:
        await worker.start()
    listed = [(each.worker_id, each.role.value, each.address, str(each.epoch)) for each in workers]
    print(json.dumps(listed), flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
