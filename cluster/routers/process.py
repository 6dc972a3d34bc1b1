"""A router as a process of its own: it never loads torch or ray, and it dies with the launcher."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster import parent_death_guard
from cluster.ray import environment as ray_environment
from router.addresses import Addresses, reachable
from twostroke.base.errors import ConfigError
from twostroke.base.json_values import from_json
from twostroke.config import RouterConfig

COMMAND = (sys.executable, "-P", "-m", "router")
"""-P: a folder named "router" in the user's working directory is not our router."""
TAIL_LINES = 12
TAIL_BYTES = 64 << 10
"""Bytes read from the end of a log to find the last lines."""
POLL_S = 0.1
ANSWER_S = 1.0
"""Seconds for the answer to a health check."""
ROUTER_ERROR = "error: "
"""Prefix of the router's last line if it could not start as configured."""
RAY_MARK = ":"
"""Prefix of lines that Ray writes into logs for itself, as in ":job_id:01000000"."""


class RouterProcess:
    """One process of a router. Create it in the main thread: the process dies with the thread that started it."""

    def __init__(self, config: RouterConfig, log_path: Path) -> None:
        self._log_path = log_path
        with log_path.open("ab") as log_file:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", parent_death_guard.__file__, str(os.getpid()), *COMMAND],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                env=ray_environment.without_secrets(),
                start_new_session=True,
                pass_fds=[each for each in (config.http_fd, config.grpc_fd, config.shared_fd) if each is not None],
            )
        self._first_line: concurrent.futures.Future[str] = concurrent.futures.Future()
        self._ended: concurrent.futures.Future[int] = concurrent.futures.Future()
        self._reader = threading.Thread(target=self._read, name="router-stdout", daemon=True)
        self._reader.start()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(config.to_json().encode())

    async def addresses(self) -> Addresses:
        """Returns where it listens, as soon as it does."""
        first_line = await asyncio.shield(asyncio.wrap_future(self._first_line))
        if not first_line:
            status = await self.wait()
            tail = self.tail()
            _, is_explained, why = tail.rpartition(ROUTER_ERROR)
            raise ConfigError(why if is_explained else f"the router ended with status {status}:\n{tail}")
        return from_json(Addresses, first_line)

    async def wait(self) -> int:
        return await asyncio.shield(asyncio.wrap_future(self._ended))

    async def leave(self, grace_s: float) -> None:
        """Lets it finish its streams while another process serves on its ports, then kills it."""
        await self._end(signal.SIGUSR1, grace_s)

    async def stop(self, grace_s: float) -> bool:
        """Lets it finish open streams for `grace_s`, then kills it. Returns whether it ended by itself."""
        return await self._end(signal.SIGTERM, grace_s)

    async def _end(self, number: signal.Signals, grace_s: float) -> bool:
        self._process.send_signal(number)
        try:
            await asyncio.wait_for(self.wait(), grace_s)
            return True
        except TimeoutError:
            self.kill()
            await self.wait()
            return False

    def kill(self) -> None:
        self._process.kill()

    def tail(self) -> str:
        return tail_of(self._log_path)

    def _read(self) -> None:
        assert self._process.stdout is not None
        self._first_line.set_result(self._process.stdout.readline().decode())
        # Whatever else is printed must not fill the pipe and stop the router.
        for _ in self._process.stdout:
            pass
        self._ended.set_result(self._process.wait())


def tail_of(log_path: Path) -> str:
    """Returns the last lines of a log file, indented."""
    try:
        with log_path.open("rb") as file:
            file.seek(max(0, log_path.stat().st_size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return "    (no log)"
    lines = [line for line in text.splitlines() if not line.startswith(RAY_MARK)]
    return "\n".join(f"    {line}" for line in lines[-TAIL_LINES:]) or "    (the log is empty)"


async def is_ready(admin_address: str) -> bool:
    """Asks at the admin port, the one port that takes no certificate."""
    async with grpc.aio.insecure_channel(reachable(admin_address)) as channel:
        try:
            question = health_pb2.HealthCheckRequest(service="ready")
            said = await health_pb2_grpc.HealthStub(channel).Check(question, timeout=ANSWER_S)
        except grpc.aio.AioRpcError:
            return False
    return bool(said.status == health_pb2.HealthCheckResponse.SERVING)


async def until_ready(admin_address: str) -> None:
    # Polled: readiness of another process has no event here.
    while not await is_ready(admin_address):  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)
