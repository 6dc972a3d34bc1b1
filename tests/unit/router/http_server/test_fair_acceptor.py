"""Routers that share a listening socket get about as many connections each, and wait for none that takes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from router.addresses import bind_listener
from router.http_server.fair_acceptor import TOLERANCE, TURN_S, FairAcceptor
from router.shared_memory import RouterMemory, create_router_memory

CLIENTS = 64


class Connections:
    """The connections of one router."""

    def __init__(self, listener: socket.socket, shared: RouterMemory) -> None:
        self.open = 0
        self.serves = True
        self.shared = shared
        self.acceptor = FairAcceptor(listener, self._protocol, lambda: self.open, shared, lambda: self.serves)

    def _protocol(self) -> asyncio.Protocol:
        counted = self

        class Counted(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                counted.open += 1

            def connection_lost(self, exc: Exception | None) -> None:
                counted.open -= 1

        return Counted()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    opened = bind_listener("127.0.0.1", 0)
    yield opened
    opened.close()


@contextlib.asynccontextmanager
async def routers(listener: socket.socket, count: int) -> AsyncIterator[list[Connections]]:
    descriptor = create_router_memory()
    sockets = [listener.dup() for _ in range(count)]
    opened = [Connections(each, RouterMemory.inherited(descriptor)) for each in sockets]
    yield opened
    for each in opened:
        if each.shared.is_shared:  # it has not ended
            each.acceptor.stop()
    for socket_of_one in sockets:
        socket_of_one.close()
    os.close(descriptor)


@contextlib.asynccontextmanager
async def clients(listener: socket.socket, count: int, *, at_once: bool) -> AsyncIterator[list[asyncio.StreamWriter]]:
    address, writers = listener.getsockname(), list[asyncio.StreamWriter]()

    async def connect() -> None:
        _, writer = await asyncio.open_connection(*address)
        writers.append(writer)
        await asyncio.sleep(TURN_S)

    if at_once:
        await asyncio.gather(*(connect() for _ in range(count)))
    else:
        for _ in range(count):
            await connect()
    yield writers
    for writer in writers:
        writer.close()


async def until_open(opened: list[Connections], count: int) -> None:
    async with asyncio.timeout(30):
        while sum(each.open for each in opened) < count:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("at_once", [False, True])
async def test_each_gets_its_part_of_connections_that_come_at_once_or_one_by_one(
    listener: socket.socket, at_once: bool
) -> None:
    async with routers(listener, 2) as opened:
        for each in opened:
            each.acceptor.start()
        async with clients(listener, CLIENTS, at_once=at_once):
            await until_open(opened, CLIENTS)
            least, most = sorted(each.open for each in opened)
            assert most - least <= 2 + most // TOLERANCE


async def test_one_that_takes_nothing_is_waited_for_a_moment_and_one_that_has_ended_not_at_all(
    listener: socket.socket,
) -> None:
    async with routers(listener, 2) as opened:
        serving, frozen = opened
        frozen.acceptor._publish(0)
        serving.acceptor.start()
        begun_s = time.monotonic()
        async with clients(listener, 8, at_once=True):
            await until_open([serving], 8)
        assert time.monotonic() - begun_s > TURN_S
        frozen.shared.close()
        serving.shared._alive_s.clear()  # as it is a moment later
        async with clients(listener, 1, at_once=True):
            await until_open([serving], 1)
        assert serving.acceptor._waiting is None
        assert not serving.acceptor._is_anothers_turn(100)


async def test_one_that_stops_leaves_what_comes_to_the_others(listener: socket.socket) -> None:
    async with routers(listener, 2) as opened:
        for each in opened:
            each.acceptor.start()
        opened[0].acceptor.stop()
        async with clients(listener, 6, at_once=False):
            await until_open(opened[1:], 6)
        assert opened[0].open == 0


async def test_one_that_serves_nothing_gets_connections_only_where_no_other_serves(listener: socket.socket) -> None:
    async with routers(listener, 2) as opened:
        for each in opened:
            each.acceptor.start()
        opened[0].serves = False
        async with clients(listener, 6, at_once=False):
            await until_open(opened[1:], 6)
            assert opened[0].open == 0
            opened[1].serves = False
            async with clients(listener, 6, at_once=False):
                await until_open(opened, 12)
