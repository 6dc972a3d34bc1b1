"""A gRPC server behind the listener's process, and services of every kind."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from router.addresses import bind_listener
from router.grpc_listener.client_names import client_host
from router.grpc_listener.running import ListenerProcess
from tests.listener_thread import ListenerThread
from twostroke.base.credentials import TlsConfig
from twostroke.rpc.entrance import Context, StrangersEntrance
from twostroke.rpc.server import Callers, RpcServer

SERVICE = "test.Calls"


class Calls:
    """Calls of a test, and what the server saw of them."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        """Names of calls, in the order in which the server looked at them."""
        self.hosts: set[str] = set()

    async def Echo(self, raw: bytes, context: Context) -> bytes:  # noqa: N802
        self.hosts.add(client_host(context.peer()))
        return raw

    async def Stream(self, raw: bytes, context: Context) -> AsyncIterator[bytes]:  # noqa: N802
        """`raw`: the number of messages, and of their bytes if they are not 60."""
        messages, *size = map(int, raw.split())
        for number in range(messages):
            yield b"%0*d" % (size[0] if size else 60, number)

    async def Stall(self, raw: bytes, context: Context) -> bytes:  # noqa: N802
        await asyncio.Event().wait()
        raise AssertionError

    def add_to(self, server: grpc.aio.Server) -> None:
        handlers = {
            "Echo": grpc.unary_unary_rpc_method_handler(self.Echo),
            "Stream": grpc.unary_stream_rpc_method_handler(self.Stream),
            "Stall": grpc.unary_unary_rpc_method_handler(self.Stall),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    @contextlib.contextmanager
    def admit(self, context: Context):
        named = dict(context.invocation_metadata() or ()).get("name", "")
        self.seen.append(str(named))
        yield


class Served:
    def __init__(self, server: RpcServer, calls: Calls, cuts: Counter[str], listener: ListenerProcess) -> None:
        self.server = server
        self.address = server.address
        self.calls = calls
        self.cuts = cuts
        self.listener = listener


@contextlib.asynccontextmanager
async def served(
    kind: type[ListenerProcess] = ListenerThread, most: int = 100, tls: TlsConfig | None = None
) -> AsyncIterator[Served]:
    listening, cuts, calls = bind_listener("127.0.0.1", 0), Counter[str](), Calls()
    listener = kind(listening, most, tls, lambda why: cuts.update([why]))
    callers = Callers(
        options=(("grpc.max_concurrent_streams", 4096), ("grpc.http2.max_ping_strikes", 0)),
        entrance=StrangersEntrance(calls.admit),
        max_message_bytes=64 << 20,
        most_connections=most,
    )
    server = RpcServer("127.0.0.1", listener.port, token=None, callers=callers, behind=listener)
    calls.add_to(server.server)
    await server.start()
    try:
        yield Served(server, calls, cuts, listener)
    finally:
        await server.stop(0)
