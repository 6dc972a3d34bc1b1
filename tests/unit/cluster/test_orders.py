"""Orders to a running launcher, over its socket."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cluster import orders
from twostroke.errors import InvalidRequest, NotFound, PeerLost


async def test_what_comes_of_an_order_goes_back_as_a_result_or_as_the_error_that_it_was(tmp_path: Path) -> None:
    async def add(a: int, b: int) -> int:
        return a + b

    async def fail() -> None:
        raise NotFound("there is no worker 'decode-7'")

    async with orders.taking(tmp_path, {"add": add, "fail": fail}):
        assert await asyncio.to_thread(orders.give, tmp_path, "add", a=1, b=2) == 3
        with pytest.raises(NotFound, match="decode-7"):
            await asyncio.to_thread(orders.give, tmp_path, "fail")
        with pytest.raises(InvalidRequest, match="steal"):
            await asyncio.to_thread(orders.give, tmp_path, "steal")
    with pytest.raises(PeerLost):
        orders.give(tmp_path, "add", a=1, b=2)


async def test_an_order_goes_on_when_whoever_gave_it_goes_away(tmp_path: Path) -> None:
    may_end, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await may_end.wait()
        ended.set()

    async with orders.taking(tmp_path, {"work": work}):
        _, writer = await asyncio.open_unix_connection(tmp_path / orders.SOCKET)
        writer.write(b'{"order": "work"}\n')
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        may_end.set()
        async with asyncio.timeout(10):
            await ended.wait()
