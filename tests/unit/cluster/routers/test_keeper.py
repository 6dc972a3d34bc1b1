"""A router over its lives, with processes that tests end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster.routers import keeper as router_keeper
from cluster.routers.client_ports import ClientPorts
from cluster.routers.keeper import RouterKeeper
from cluster.terminal.announce import Announcer
from router.addresses import Addresses
from twostroke.config import ListenConfig, RouterConfig


class FakeProcess:
    def __init__(self, config: RouterConfig, log_path: Path) -> None:
        self.has_left = asyncio.Event()
        self.is_up = False

    async def addresses(self) -> Addresses:
        if not self.is_up:  # it takes longer than a turn of the event loop
            await asyncio.sleep(0.01)
        self.is_up = True
        return Addresses("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", "127.0.0.1:1")

    async def wait(self) -> int:
        await self.has_left.wait()
        await asyncio.sleep(0)  # a thread tells
        return 0

    async def leave(self, grace_s: float) -> None:
        await self.has_left.wait()

    async def stop(self, grace_s: float) -> None:
        self.has_left.set()

    def kill(self) -> None:
        self.has_left.set()


@pytest.fixture
async def keeper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[RouterKeeper]:
    monkeypatch.setattr(router_keeper, "RouterProcess", FakeProcess)
    config = RouterConfig(listen=ListenConfig(http_port=0, grpc_port=0))
    with contextlib.closing(ClientPorts(config.listen, 1)) as ports:
        keeper = RouterKeeper(config, ports, tmp_path, Announcer())
        yield keeper
        keeper.kill()


@pytest.mark.parametrize("routers", [1, 2])
def test_a_router_that_is_alone_gets_the_socket_of_grpc_and_several_listen_by_themselves(routers: int) -> None:
    config = RouterConfig(listen=ListenConfig(http_port=0, grpc_port=0))
    with contextlib.closing(ClientPorts(config.listen, routers)) as ports:
        ports.open()
        given = ports.given_to(config)
        assert (given.grpc_fd is not None) == (routers == 1)
        address = "127.0.0.1", given.listen.grpc_port
        if routers == 1:
            socket.create_connection(address, timeout=60).close()
        else:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(address, timeout=60)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=60)


@pytest.mark.parametrize("turns", range(3))
async def test_lives_that_end_while_the_router_is_stopped_do_not_keep_it_from_stopping(
    keeper: RouterKeeper, turns: int
) -> None:
    """`turns` of the event loop lie between an end and the order to stop."""
    keeping = asyncio.create_task(keeper.keep("127.0.0.1:1"))
    processes: list[FakeProcess] = []
    for _ in range(3):
        while keeper._next is None or keeper._process in processes:
            await asyncio.sleep(0.01)
        processes.append(keeper._process)  # type: ignore[arg-type]  # a fake one
        await keeper.restart()
    await asyncio.sleep(0)
    for process in processes:
        process.has_left.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    keeping.cancel()
    await keeper.stop()
    await asyncio.gather(keeping, return_exceptions=True)
