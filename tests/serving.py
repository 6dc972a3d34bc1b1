"""A `twostroke serve` of our own: it ends with us, whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from cluster import parent_death_guard
from cluster.clients import state_file
from cluster.clients.state_file import ServeState
from twostroke.base.errors import ConfigError

START_S = 300.0
"""A model may have to be loaded by every worker, on a busy machine."""
STOP_S = 150.0
POLL_S = 0.1
TAIL_LINES = 12
PROGRAM = ("-m", "cluster.cli")


@contextlib.asynccontextmanager
async def serving(
    arguments: Sequence[str], environment: Mapping[str, str] | None = None, program: Sequence[str] = PROGRAM
) -> AsyncIterator[ServeState]:
    """Ready, with `arguments` of `serve`. Raises ConfigError, with what was printed, where it does not get ready."""
    with tempfile.NamedTemporaryFile() as printed:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", parent_death_guard.__file__, str(os.getpid())),
            *(sys.executable, "-P", *program, "serve", *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=printed.fileno(),
            stderr=printed.fileno(),
            env=os.environ | (environment or {}),
            start_new_session=True,  # Ctrl-C is ours to pass on: twice would kill it without a goodbye
        )
        try:
            yield await _ready(process, Path(printed.name))
        finally:
            await _stop(process)


async def _ready(process: asyncio.subprocess.Process, printed: Path) -> ServeState:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(START_S):
            while process.returncode is None:
                for state in state_file.running():
                    if state.pid == process.pid:
                        return state
                await asyncio.sleep(POLL_S)
    raise ConfigError(f"twostroke serve did not get ready; it said last:\n{_tail(printed)}", field="serve_flags")


def _tail(printed: Path) -> str:
    return "\n".join(printed.read_text(errors="replace").splitlines()[-TAIL_LINES:])


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        async with asyncio.timeout(STOP_S):
            await process.wait()
    finally:
        if process.returncode is None:
            process.kill()  # its cleanup process does the rest
            await process.wait()
