"""Keeps one router alive: started, and started again whenever it ends, on the ports that it had."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

from cluster.announce import Announcer
from cluster.router_process import Addresses, RouterProcess, until_ready
from twostroke.config import RouterConfig
from twostroke.errors import ConfigError

GRACE_S = 5.0
"""For open streams when it is told to stop."""
STEADY_S = 10.0
"""A router that ran for this long did not crash because of how it was started."""
MOST_PAUSE_S = 10.0
"""Between a router that keeps crashing and its next life."""


class RouterKeeper:
    """Of one router over its lives. Used in the main thread alone: see `RouterProcess`."""

    def __init__(self, index: int, config: RouterConfig, log_dir: Path, announcer: Announcer) -> None:
        self.name = f"router-{index}"
        self._config = config
        self._log_path = log_dir / f"{self.name}.log"
        self._announcer = announcer
        self._process: RouterProcess | None = None
        self._addresses: asyncio.Future[Addresses] | None = None

    def start(self) -> None:
        self._process = RouterProcess(self._config, self._log_path)

    async def keep(self, fleet_address: str) -> None:
        """Ends only by cancellation, or by ConfigError where its first life cannot serve as configured."""
        self._config = replace(self._config, fleet_address=fleet_address)
        crashes = 0
        while True:
            if self._process is None:
                self.start()
            assert self._process is not None
            started_s = time.monotonic()
            ending = await self._live(self._process)
            crashes = 1 if time.monotonic() - started_s > STEADY_S else crashes + 1
            self._announcer.warn(f"{self.name} {ending}; it is started again\n{self._process.tail()}")
            self._process = None
            await asyncio.sleep(min(MOST_PAUSE_S, 0.5 * (crashes - 1)))

    async def until_ready(self) -> Addresses:
        """Where it listens, once it could answer."""
        addresses = await asyncio.shield(self._listening())
        await until_ready(addresses.http)
        return addresses

    async def stop(self) -> None:
        if self._process is not None:
            await self._process.stop(GRACE_S)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    async def _live(self, process: RouterProcess) -> str:
        """One life; how it ended. In later ones a port may be taken by somebody else for a while."""
        listening = self._listening()
        try:
            addresses = await process.addresses()
        except ConfigError as error:
            if not listening.done():
                raise
            return f"could not start: {error.message}"
        if not listening.done():
            self._config = replace(self._config, http_port=_port(addresses.http), grpc_port=_port(addresses.grpc))
            listening.set_result(addresses)
        return f"ended with status {await process.wait()}"

    def _listening(self) -> asyncio.Future[Addresses]:
        """Set by its first life; later ones have the same addresses."""
        if self._addresses is None:
            self._addresses = asyncio.get_running_loop().create_future()
        return self._addresses


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])
