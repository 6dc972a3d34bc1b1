"""A worker as a process: how it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.worker.rig import worker_config
from twostroke.base.errors import InternalError
from twostroke.config import Role
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


LOADS_FOR_EVER = """
import sys, time
from decode_worker.worker import DecodeWorker
from twostroke.worker import engine_state, process

def build(config, profiler):
    print("loading", flush=True)
    time.sleep(1e6)

engine_state._build = build
sys.exit(process.main(DecodeWorker))
"""


def test_a_worker_that_is_told_to_end_while_it_loads_ends_as_after_a_drain() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LOADS_FOR_EVER], cwd=Path(__file__).parents[3], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(worker_config(Role.DECODE).to_json())
        process.stdin.close()
        process.stdin = None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=DRAIN_S / 3)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert "Traceback" not in errors
