"""Tests of who is late, and who is silent: connections to slow processes, and listeners that were not there."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from twostroke.base.errors import PeerLost
from twostroke.rpc.channel import PeerChannel, error_of, is_refusal
from twostroke.rpc.server import RpcServer
from twostroke.rpc.silence import TICK_S, listening
from twostroke.rpc.v1 import control_pb2, worker_pb2
from twostroke.rpc.v1.control_pb2_grpc import ControlServicer, ControlStub, add_ControlServicer_to_server
from twostroke.rpc.v1.worker_pb2_grpc import DecodeServicer, DecodeStub, add_DecodeServicer_to_server


class Told(ControlServicer):
    async def GetServerInfo(self, request, context):  # noqa: N802
        return control_pb2.ServerInfo(server_id="told")


async def test_a_process_that_takes_its_time_to_accept_a_connection_is_reached() -> None:
    """It is stopped for a moment, or gets no CPU: the kernel accepts for it, and its first bytes come late."""
    server = RpcServer("127.0.0.1", 0, token=None)  # with a token, no call may come over a relay
    add_ControlServicer_to_server(Told(), server.server)
    await server.start()
    host, _, port = server.address.rpartition(":")

    relays: set[asyncio.Task[None] | None] = set()

    async def relay(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        relays.add(asyncio.current_task())
        await asyncio.sleep(0.4)
        theirs, to_server = await asyncio.open_connection(host, int(port))

        async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(1 << 16):
                    writer.write(data)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

        await asyncio.gather(pump(source, to_server), pump(theirs, sink))

    slow = await asyncio.start_server(relay, "127.0.0.1", 0)
    channel = PeerChannel(f"127.0.0.1:{slow.sockets[0].getsockname()[1]}", "")
    stub = ControlStub(channel.channel)
    info = await stub.GetServerInfo(control_pb2.GetServerInfoRequest(), metadata=channel.metadata, timeout=30)
    assert info.server_id == "told"
    await channel.close()
    slow.close()
    await server.stop(0)
    await asyncio.gather(*(task for task in relays if task is not None))


async def test_a_port_where_nobody_listens_is_known_by_its_refusal() -> None:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
    await server.wait_closed()
    channel = PeerChannel(address, "secret")
    with pytest.raises(Exception, match="refused") as raised:
        await ControlStub(channel.channel).GetServerInfo(control_pb2.GetServerInfoRequest(), timeout=30)
    assert is_refusal(error_of(raised.value, address))
    assert not is_refusal(PeerLost(f"{address}: Socket closed"))
    await channel.close()


async def test_what_was_said_while_nobody_listened_is_heard() -> None:
    said: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def stand_still() -> None:
        time.sleep(6 * TICK_S)
        asyncio.get_running_loop().call_later(TICK_S / 2, said.set_result, "here")

    asyncio.get_running_loop().call_later(TICK_S / 2, stand_still)
    async with listening(3 * TICK_S):
        assert await said == "here"


async def test_silence_ends_the_listening_and_whatever_is_heard_prolongs_it() -> None:
    times = 0

    async def speak_and_fall_silent() -> None:
        nonlocal times
        async with listening(3 * TICK_S) as heard:
            while times < 3:
                await asyncio.sleep(2 * TICK_S)
                times += 1
                heard()
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await speak_and_fall_silent()
    assert times == 3


class Talkative(DecodeServicer):
    """Says something whenever it is asked for more."""

    said = 0

    async def Tokens(self, request, context):  # noqa: N802
        while True:
            self.said += 1
            yield worker_pb2.TokenBatch(entries=[worker_pb2.TokenEntry(request_id="x" * (256 << 10))])


async def test_a_stream_that_nobody_reads_is_not_written_to_for_long() -> None:
    """So what a worker has for a frozen router stays in its output_stream, which holds no token twice."""
    talker, server = Talkative(), RpcServer("127.0.0.1", 0, token="secret")
    add_DecodeServicer_to_server(talker, server.server)
    await server.start()
    channel = PeerChannel(server.address, "secret")
    call = DecodeStub(channel.channel).Tokens(worker_pb2.TokensRequest(), metadata=channel.metadata)
    await call.read()
    before = 0
    async with asyncio.timeout(30):
        while talker.said > before:
            before = talker.said
            await asyncio.sleep(3 * TICK_S)
    assert talker.said < 100, "some megabytes are in buffers, and that is all"
    call.cancel()
    await channel.close()
    await server.stop(0)
