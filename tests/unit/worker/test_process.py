"""A worker as a process: how it ends."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from twostroke.errors import InternalError
from twostroke.worker.host import ReadyInfo
from twostroke.worker.process import DRAIN_S, _serve


class DiesWhileItDrains:
    def __init__(self) -> None:
        self._drains = asyncio.Event()

    async def run(self) -> None:
        await self._drains.wait()
        raise InternalError("the engine thread ended")

    async def ready(self) -> ReadyInfo:
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
        return ReadyInfo("w", "decode", "here:1", "1.00", "fingerprint", "here:2", 1)

    async def drain(self, deadline_s: float) -> int:
        self._drains.set()
        await asyncio.sleep(deadline_s)
        return 1

    async def shutdown(self) -> None:
        pass


async def test_a_worker_that_dies_while_it_drains_ends_at_once_with_its_error() -> None:
    serving = asyncio.create_task(_serve(DiesWhileItDrains()))  # type: ignore[arg-type]  # no worker at all
    done, _ = await asyncio.wait([serving], timeout=DRAIN_S / 3)
    assert done
    with pytest.raises(InternalError, match="engine"):
        await serving
