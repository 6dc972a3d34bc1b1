"""A page source holds pages for a puller for as long as that one lives, and a second or two longer."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
from collections.abc import AsyncIterator
from unittest import mock

import pytest

from tests.cluster.fleet.test_worker_processes import worker_process
from tests.cluster.processes import PATIENCE_S
from tests.metrics_page import total
from tests.process_table import has_stopped
from tests.trials.chaos.injection.plan import ENVIRONMENT
from tests.unit.worker.callers import Puller, Router
from tests.unit.worker.rig import BLOCK, Running, eventually, expected_tokens, prefill, prompt_of, worker_config
from twostroke.base.errors import ServeError
from twostroke.base.fault_points import Point
from twostroke.config import Role, RuntimeConfig
from twostroke.kv_cache.groups.page_state import PageState
from twostroke.rpc import proof
from twostroke.worker.host import ReadyInfo

BLOCKS = 8
PROMPT = prompt_of(BLOCKS * BLOCK + 5)


class Link:
    """A proxy that can stop passing anything on, as a network does that is cut: nobody is told."""

    def __init__(self, address: str) -> None:
        self._host, _, self._port = address.rpartition(":")
        self._passes = asyncio.Event()
        self._passes.set()
        self._pumps: set[asyncio.Task[None]] = set()
        self.address = ""

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Link]:
        """It is dialled in place of a server of this process, which would refuse another port than its own."""
        server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with mock.patch.object(proof, "check_dialled"):
            yield self
        server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    def cut(self) -> None:
        self._passes.clear()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._host, int(self._port))
        for one, other in ((reader, back), (there, writer)):
            self._pumps.add(asyncio.create_task(self._pump(one, other)))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                await self._passes.wait()
                writer.write(data)
        except OSError:
            """One end has gone: so does the other."""
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def test_a_lease_ends_when_its_puller_is_cut_off() -> None:
    """Killed and frozen pullers: test_worker_processes."""
    async with prefill() as source, Link(source.info.address).open() as link:
        info = dataclasses.replace(source.info, address=link.address)
        async with contextlib.aclosing(Puller(info)) as puller:
            await puller.pages(puller.pull(PROMPT[: BLOCKS * BLOCK]), BLOCKS)
            assert source.host.pool.count(PageState.ACTIVE) == BLOCKS
            link.cut()
            await source.idle()


async def test_a_frozen_puller_that_wakes_after_its_pages_were_used_again_takes_none_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The source has taken it for dead, and what it announced to it lies elsewhere or nowhere; the puller sees its
    memory all the same."""
    async with prefill(pages=2 * BLOCKS, runtime=RuntimeConfig(transports=("shm",))) as source:
        monkeypatch.setenv(ENVIRONMENT, f"{Point.PULL_ANNOUNCED}:stop:1:60")
        monkeypatch.setattr(proof, "check_dialled", mock.Mock())  # a process with faults dials the ports of proxies
        config = worker_config(Role.DECODE, runtime=RuntimeConfig(transports=("shm",)))
        async with worker_process(config) as (target, info), contextlib.aclosing(Router(info)) as router:
            await router.connect()
            with contextlib.suppress(ServeError):  # it may be frozen before it has answered
                await router.open(PROMPT, 5, source=source.source)
            await eventually(lambda: has_stopped(target.child.pid))
            await source.idle()
            await use_again(source)
            target.signal(signal.SIGCONT)
            await router.connect()
            await router.attach(from_position=0)
            got = router.of()
            async with asyncio.timeout(PATIENCE_S):
                await got.done.wait()
            assert got.tokens[-5:] == expected_tokens(PROMPT, 5)
            assert await metric(info, "twostroke_pull_failures_total") == 1
            assert await metric(info, "twostroke_pull_bytes_total") == 0


async def use_again(source: Running) -> None:
    """Every page gets another block."""
    prompt = prompt_of(2 * BLOCKS * BLOCK, seed=9)
    async with contextlib.aclosing(Puller(source.info)) as puller:
        call = puller.pull(prompt)
        await puller.pages(call, 2 * BLOCKS)
        call.cancel()
    await source.idle()
    assert source.host.memory.generations.min() >= 1


async def metric(info: ReadyInfo, name: str) -> float:
    return await asyncio.to_thread(total, info.metrics_address, name)
