"""Whole servers behind real sockets: nothing that anybody sends changes what they own, or keeps them busy."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message

from cluster.supervisor.fleet_service import FleetService
from router.branches import BRANCHES
from router.metrics import RouterMetrics
from router.server import RouterServer
from router.text.tokenizer import ByteText
from tests.inline_preparer import InlinePreparer
from tests.trials.chaos.fuzz.kserve import infer_seeds
from tests.trials.chaos.fuzz.mutate import frame, mutate_bytes, mutate_frames, mutate_message
from tests.trials.chaos.fuzz.parsers import (
    COUNTS,
    HANDSHAKE,
    IDS,
    OPEN,
    OWNER,
    PAGE_BYTES,
    PAGES,
    READER,
    RESUMED,
    Untouched,
    script,
)
from tests.trials.chaos.fuzz.target import Target, Try
from tests.unit.router.conftest import ScriptedDispatcher
from tests.unit.worker.rig import TOKEN, Running, decode, prefill
from twostroke.base.ids import PageId
from twostroke.config import EndpointsConfig, ListenConfig, RouterConfig, RoutingConfig
from twostroke.kv_cache.memory import PageMemory
from twostroke.rpc.proof import TOKEN_KEY
from twostroke.rpc.server import RpcServer
from twostroke.rpc.v1 import control_pb2, fleet_pb2, fleet_pb2_grpc, inference_pb2, kserve_pb2, worker_pb2
from twostroke.transfer.base import PageCopy, ReadOutcome
from twostroke.transfer.copy_thread_transport import CopyThreadTransport
from twostroke.transfer.network.tcp import TcpTransport
from twostroke.transfer.same_host.shm import ShmTransport

STRANGER = 0x80
"""Set in the first byte: the caller does not know the token."""
LOOK_EVERY = 64
"""Tries between two looks at what the server holds."""
ANSWER_S = 0.05
"""For a stream: some go on for ever."""
BROKEN = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS}
SHUT = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.DEADLINE_EXCEEDED}
"""What a stranger may get to see; the last where the machine is slow."""
DESTRUCTIVE = {"Drain"}
"""Whoever knows the token may end a worker's service."""
HALF_OPEN = 24
"""Connections that say no more and are not closed, at any time."""
THREADS_S = 20.0
"""Time for threads to end whose work is over."""


# Page ports


@contextlib.contextmanager
def page_ports() -> Iterator[Try]:
    with asyncio.Runner() as runner:
        pages, mine = Untouched(), PageMemory(PAGES, PAGE_BYTES)
        owners: list[CopyThreadTransport[Any, Any]] = [TcpTransport("127.0.0.1"), ShmTransport()]
        readers: list[CopyThreadTransport[Any, Any]] = [TcpTransport("127.0.0.1"), ShmTransport()]
        endpoints = [runner.run(owner.open(pages.memory, OWNER)) for owner in owners]
        for reader in readers:
            runner.run(reader.open(mine, READER))
        half_open: list[socket.socket] = []
        tries = 0

        async def pull(which: int) -> None:
            peer = await readers[which].connect(endpoints[which], 5.0)
            transfer = readers[which].pull(peer, [PageCopy(PageId(3), PageId(0), 5)], 5.0)
            assert (await readers[which].wait(transfer)).outcome is ReadOutcome.DONE

        def look() -> None:
            pages.check()
            for which in range(len(owners)):
                runner.run(pull(which))
            assert (mine.page(PageId(0)) == pages.memory.page(PageId(3))).all()

        def attempt(data: bytes) -> None:
            nonlocal tries
            which, rest = (data[0] % 2, data[1:]) if data else (0, b"")
            address = endpoints[which].address
            sock = socket.socket(socket.AF_UNIX) if which else socket.socket()
            with contextlib.suppress(OSError):
                sock.connect("\0" + address if which else ("127.0.0.1", int(address.rpartition(":")[2])))
                for part in (rest[: len(rest) // 2], rest[len(rest) // 2 :]):
                    sock.sendall(part)
            if len(half_open) == HALF_OPEN:
                half_open.pop(0).close()
            half_open.append(sock)
            tries += 1
            if tries % LOOK_EVERY == 0:
                look()

        try:
            yield attempt
            look()
        finally:
            for sock in half_open:
                sock.close()
            for transport in (*readers, *owners):
                runner.run(transport.close())
            mine.close()
            pages.memory.close()
        _wait_for_threads("pages-")


def _wait_for_threads(prefix: str) -> None:
    """A thread whose work is over may need a moment to end on a busy machine."""
    give_up_s = time.monotonic() + THREADS_S
    while left := [thread.name for thread in threading.enumerate() if thread.name.startswith(prefix)]:
        assert time.monotonic() < give_up_s, left
        time.sleep(0.01)


def _mutate_page_port(data: bytes, draw: random.Random) -> bytes:
    return bytes([draw.randrange(2)]) + mutate_frames(data[1:], draw)


# Calls


def methods_of(*modules: Any, without: set[str] = DESTRUCTIVE) -> list[MethodDescriptor]:
    services = [service for module in modules for service in module.DESCRIPTOR.services_by_name.values()]
    return [method for service in services for method in service.methods if method.name not in without]


def _kind(method: MethodDescriptor) -> type[Message]:
    return method.input_type._concrete_class  # type: ignore[no-any-return]


def _mutate_call(methods: Sequence[MethodDescriptor]) -> Callable[[bytes, random.Random], bytes]:
    mutators = [mutate_message(_kind(method)) for method in methods]

    def mutate(data: bytes, draw: random.Random) -> bytes:
        first, rest = (data[0], data[1:]) if data else (0, b"")
        if not draw.randrange(10):
            first = draw.randrange(len(methods)) | draw.choice((0, 0, STRANGER))
        changed = (
            mutate_bytes(rest, draw) if not draw.randrange(6) else mutators[first % STRANGER % len(methods)](rest, draw)
        )
        return bytes([first]) + changed

    return mutate


async def _are_written(call: grpc.aio.StreamStreamCall[bytes, bytes], requests: Sequence[bytes]) -> bool:
    """Returns False where the call's time ended before: gRPC's client then raises errors of its own, of many kinds."""
    try:
        for raw in requests:
            await call.write(raw)
        await call.done_writing()
    except (Exception, asyncio.CancelledError):
        return False
    return True


async def ask(channel: grpc.aio.Channel, method: MethodDescriptor, raw: bytes, token: str) -> grpc.StatusCode:
    path = f"/{method.containing_service.full_name}/{method.name}"
    metadata = ((TOKEN_KEY, token),)
    try:
        if method.client_streaming:
            requests = channel.stream_stream(path)(metadata=metadata, timeout=ANSWER_S)
            if not await _are_written(requests, [raw, raw]):
                return grpc.StatusCode.CANCELLED
            while isinstance(response := await requests.read(), bytes):
                failure = kserve_pb2.ModelStreamInferResponse.FromString(response).error_message
                assert not failure.startswith("internal error"), failure
        elif method.server_streaming:
            call = channel.unary_stream(path)(raw, metadata=metadata, timeout=ANSWER_S)
            async for _ in call:
                pass
        else:
            await channel.unary_unary(path)(raw, metadata=metadata, timeout=20.0)
    except grpc.aio.AioRpcError as error:
        if error.code() in BROKEN:
            raise AssertionError(f"{method.full_name}: {error.code()} {error.details()}") from error
        return error.code()
    return grpc.StatusCode.OK


async def _call(channel: grpc.aio.Channel, methods: Sequence[MethodDescriptor], data: bytes, raw: bytes) -> None:
    is_stranger = bool(data[0] & STRANGER)
    method = methods[data[0] % STRANGER % len(methods)]
    status = await ask(channel, method, raw, "guess" if is_stranger else TOKEN)
    assert not is_stranger or status in SHUT, f"a stranger got {status} from {method.full_name}"


WORKER_METHODS = methods_of(worker_pb2, control_pb2)


@contextlib.contextmanager
def worker_calls() -> Iterator[Try]:
    """A decode worker, which is a page source, too; and a prefill worker that shares the first one's calls."""
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        workers = [runner.run(stack.enter_async_context(make(pages=32))) for make in (decode, prefill)]
        channels = [grpc.aio.insecure_channel(worker.info.address) for worker in workers]
        opened: set[tuple[str, int]] = set()
        tries = 0

        async def close_all() -> None:
            for request_id, attempt in opened:
                close = worker_pb2.CloseRequest(request_id=request_id, attempt=attempt)
                method = worker_pb2.DESCRIPTOR.services_by_name["Decode"].methods_by_name["Close"]
                await ask(channels[0], method, close.SerializeToString(), TOKEN)
            opened.clear()
            for worker in workers:
                await worker.idle()

        def attempt(data: bytes) -> None:
            nonlocal tries
            if not data:
                return
            raw = data[1:]
            method = WORKER_METHODS[data[0] % STRANGER % len(WORKER_METHODS)]
            with contextlib.suppress(DecodeError):
                message = _kind(method).FromString(raw)
                raw = _addressed(message, workers[tries % 2]).SerializeToString()
                if isinstance(message, worker_pb2.OpenRequest):
                    opened.add((message.request_id, message.attempt))
            runner.run(_call(channels[tries % 2], WORKER_METHODS, data, raw))
            tries += 1
            if tries % LOOK_EVERY == 0:
                runner.run(close_all())

        try:
            yield attempt
            runner.run(close_all())
        finally:
            for channel in channels:
                runner.run(channel.close())
            runner.run(stack.aclose())


def _addressed(message: Message, worker: Running) -> Message:
    if "fingerprint" in message.DESCRIPTOR.fields_by_name and message.fingerprint == "fingerprint":  # type: ignore[attr-defined]
        message.fingerprint = worker.info.fingerprint  # type: ignore[attr-defined]
    for field in ("worker_epoch", "source_epoch"):
        if field in message.DESCRIPTOR.fields_by_name and getattr(message, field) == str(OWNER.epoch):
            setattr(message, field, worker.info.epoch)
    return message


def _worker_seeds() -> Sequence[bytes]:
    known = {
        "PullRequest": worker_pb2.PullRequest(
            request_id="r#0", requester="w", fingerprint="fingerprint", tokens=OPEN.request.prompt,
            block_hashes=OPEN.block_hashes,
            wanted=[worker_pb2.WantedPages(blocks=[0, 1])], peer=OPEN.source, peer_blocks=1,
        ),
        "OpenRequest": OPEN,
        "CloseRequest": worker_pb2.CloseRequest(request_id="r#0", attempt=1),
        "AttachRequest": worker_pb2.AttachRequest(request_id="r#0", attempt=1, router_id="router-0", from_position=1),
        "TokensRequest": worker_pb2.TokensRequest(router_id="router-0"),
        "FetchRequest": worker_pb2.FetchRequest(
            fingerprint="fingerprint", worker_epoch=str(OWNER.epoch), source=OPEN.source,
            block_hashes=OPEN.block_hashes,
            root=bytes(16), within_s=0.2,
        ),
        "FindRequest": worker_pb2.FindRequest(stream="r"),
    }  # fmt: skip
    return _seeds(WORKER_METHODS, known)


def _seeds(methods: Sequence[MethodDescriptor], known: dict[str, Message]) -> list[bytes]:
    messages = [known.get(method.input_type.name) or _kind(method)() for method in methods]
    return [bytes([index]) + message.SerializeToString() for index, message in enumerate(messages)]


FLEET_METHODS = methods_of(fleet_pb2, without=set())


@contextlib.contextmanager
def fleet_calls() -> Iterator[Try]:
    """The supervisor's; faults can be armed in no process that was not started for it."""
    with asyncio.Runner() as runner:

        @contextlib.asynccontextmanager
        async def served() -> AsyncIterator[tuple[FleetService, grpc.aio.Channel]]:
            fleet, server = FleetService(), RpcServer("127.0.0.1", 0, token=TOKEN)
            fleet_pb2_grpc.add_FleetServicer_to_server(fleet, server.server)
            await server.start()
            async with grpc.aio.insecure_channel(server.address) as channel:
                yield fleet, channel
            await server.stop(0)

        serving = served()
        fleet, channel = runner.run(serving.__aenter__())
        try:
            yield lambda data: runner.run(_call(channel, FLEET_METHODS, data, data[1:])) if data else None
            runner.run(_until(lambda: not fleet._watchers))
        finally:
            runner.run(serving.__aexit__(None, None, None))


ROUTER_METHODS = methods_of(inference_pb2, kserve_pb2)
HTTP = len(ROUTER_METHODS)
"""First byte, or any higher, that stands for raw bytes for the HTTP port."""


@contextlib.contextmanager
def router_ports() -> Iterator[Try]:
    with asyncio.Runner() as runner:
        dispatcher = ScriptedDispatcher(script=script)
        endpoints = EndpointsConfig(max_request_bytes=1 << 16)
        config = RouterConfig(
            listen=ListenConfig(http_port=0, grpc_port=0),
            served_model_name="toy",
            routing=RoutingConfig(seed=1),
            endpoints=endpoints,
        )
        server = RouterServer(
            config, dispatcher, InlinePreparer(ByteText()), RouterMetrics(), router_id="router-0", branches=BRANCHES
        )
        serving = server.serving()
        runner.run(serving.__aenter__())
        channel = grpc.aio.insecure_channel(server.addresses.grpc)
        host, port = server.addresses.http.rsplit(":", 1)

        async def http(raw: bytes) -> None:
            reader, writer = await asyncio.open_connection(host, int(port))
            with contextlib.suppress(OSError, TimeoutError):
                writer.write(raw)
                answer = await asyncio.wait_for(reader.read(1 << 16), ANSWER_S)
                assert not answer.startswith(b"HTTP/1.1 500"), "an internal error"
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

        async def attempt(data: bytes) -> None:
            if data[0] % (HTTP + 2) >= HTTP:
                await http(data[1:])
            else:
                await ask(channel, ROUTER_METHODS[data[0] % (HTTP + 2)], data[1:], "")
            for forgotten in (dispatcher.requests, dispatcher.early, dispatcher._aborted):
                forgotten.clear()

        try:
            yield lambda data: runner.run(attempt(data)) if data else None
            runner.run(_until(lambda: not dispatcher.open_ids))
        finally:
            runner.run(channel.close())
            runner.run(serving.__aexit__(None, None, None))


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20.0):
        while not condition():
            await asyncio.sleep(0.01)


def _mutate_router_ports(data: bytes, draw: random.Random) -> bytes:
    if data and data[0] < HTTP and draw.randrange(8):
        return data[:1] + mutate_message(_kind(ROUTER_METHODS[data[0]]))(data[1:], draw)
    return bytes([draw.choice((data[0] if data else 0, draw.randrange(HTTP + 1)))]) + mutate_bytes(data[1:], draw)


def _infer_methods() -> list[int]:
    return [rank for rank, method in enumerate(ROUTER_METHODS) if method.input_type.name == "ModelInferRequest"]


def _router_port_seeds() -> Sequence[bytes]:
    generate = inference_pb2.GenerateRequest(
        text="abc",
        n=2,
        sampling=inference_pb2.SamplingOptions(temperature=0.5, top_k=3, seed=1, logit_bias={3: 1.0}, logprobs=2),
        stop=inference_pb2.StopOptions(stop=["x"], max_tokens=4, stop_token_ids=[9]),
        resume_from=RESUMED,
    )
    call = inference_pb2.ToolCall(id="call-1", name="look", arguments='{"at": 7}')
    chat = inference_pb2.Chat(
        messages=[
            inference_pb2.ChatMessage(role="assistant", reasoning="hm", tool_calls=[call]),
            inference_pb2.ChatMessage(role="tool", content="hi", tool_call_id="call-1", name="look"),
        ],
        tools='[{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]',
        tool_choice="none",
        chat_template_kwargs='{"enable_thinking": false}',
        add_generation_prompt=True,
        parallel_tool_calls=True,
    )
    body = b'{"prompt": "abc", "max_tokens": 3, "stream": true}'
    length = str(len(body)).encode()
    post = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return [
        *_seeds(ROUTER_METHODS, {"GenerateRequest": generate}),
        *(bytes([rank]) + seed for rank in _infer_methods() for seed in infer_seeds()),
        bytes([0]) + inference_pb2.GenerateRequest(chat=chat, request_id="mine").SerializeToString(),
        bytes([HTTP])
        + post
        + b"last-event-id: "
        + RESUMED.encode()
        + b"\r\ncontent-length: "
        + length
        + b"\r\n\r\n"
        + body,
        bytes([HTTP]) + post + b'transfer-encoding: chunked\r\n\r\n5\r\n{"pro\r\n0\r\n\r\n',
        bytes([HTTP]) + b"GET /v1/models/toy HTTP/1.1\r\nhost: localhost\r\n\r\nGET /live HTTP/1.0\r\n\r\n",
    ]


SERVERS = [
    Target(
        "page-ports",
        [bytes([which]) + HANDSHAKE + frame([5.0, IDS, COUNTS]) for which in range(2)],
        _mutate_page_port,
        page_ports,
        is_live=True,
    ),
    Target("worker-calls", _worker_seeds(), _mutate_call(WORKER_METHODS), worker_calls, is_live=True),
    Target("fleet-calls", _seeds(FLEET_METHODS, {}), _mutate_call(FLEET_METHODS), fleet_calls, is_live=True),
    Target("front-doors", _router_port_seeds(), _mutate_router_ports, router_ports, is_live=True),
]
