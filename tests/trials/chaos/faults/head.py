"""Ray's head (its GCS) killed or frozen, and started again as it was."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil

from cluster import parent_death_guard
from tests import process_table

PORT_FLAG = "--gcs_server_port="


def kill(head: psutil.Process) -> None:
    os.kill(head.pid, signal.SIGKILL)


async def freeze(head: psutil.Process, seconds: float) -> None:
    os.kill(head.pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        os.kill(head.pid, signal.SIGCONT)


class Restart:
    """Read while it is alive: how it is started again, as a machine's supervisor would."""

    def __init__(self, head: psutil.Process) -> None:
        self._command = _with_port(head.cmdline(), process_table.listening_ports(head))
        self._environment = process_table.environment_of(head)

    async def start(self) -> asyncio.subprocess.Process:
        """It dies with us."""
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", parent_death_guard.__file__, str(os.getpid()), *self._command),
            env=self._environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )


def _with_port(command: list[str], ports: frozenset[int]) -> list[str]:
    """Everybody knows its address: it comes back there."""
    (port,) = ports
    executable, *flags = command
    assert Path(executable).exists(), executable
    return [executable, *(f"{PORT_FLAG}{port}" if flag.startswith(PORT_FLAG) else flag for flag in flags)]
