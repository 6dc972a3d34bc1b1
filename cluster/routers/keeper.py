"""Keeps one router process alive on the same ports."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from cluster.routers.client_ports import ClientPorts
from cluster.routers.process import RouterProcess, until_ready
from cluster.terminal.announce import Announcer
from cluster.values.exits import ProcessExit
from cluster.values.spec import LAUNCHED_GRACE_S
from router.addresses import Addresses
from twostroke.base.errors import ConfigError, PeerLost
from twostroke.config import RouterConfig

GRACE_S = LAUNCHED_GRACE_S + 2.0
"""Seconds after which a router that was told to stop is killed: what it gives open requests, and time to end."""
HAND_OVER_S = 125.0
"""Seconds for a replaced process to finish its streams; it ends by itself a little earlier."""
STEADY_S = 10.0
"""Seconds of running after which a crash is not blamed on the start."""
MOST_PAUSE_S = 10.0
"""Longest pause, in seconds, before a router that keeps crashing is started again."""


class RouterKeeper:
    """Starts one router's process again whenever it ends. Use it only in the main thread: see `RouterProcess`.

    The ports for clients stay open between two processes: a client that connects meanwhile is served by another router,
    or waits where there is none, and is not refused.
    """

    def __init__(self, config: RouterConfig, ports: ClientPorts, log_dir: Path, announcer: Announcer) -> None:
        """`ports` may be those of several routers, and are closed by their owner."""
        self.name = f"router-{config.number}"
        self._ports = ports
        self._config = config.replace(owns_log_file=True)
        self._log_path = log_dir / f"{self.name}.log"
        self._announcer = announcer
        self._process: RouterProcess | None = None
        self._next: asyncio.Future[RouterProcess] | None = None
        """Set when another process replaces the current one."""
        self._leaving: set[asyncio.Task[None]] = set()
        self._replaced: set[RouterProcess] = set()
        self._addresses: asyncio.Future[Addresses] | None = None

    def start(self) -> None:
        """Starts the process. Raises ConfigError where a port for clients is taken."""
        self._ports.open()
        self._config = self._ports.given_to(self._config)
        self._process = RouterProcess(self._config, self._log_path)

    async def keep(self, fleet_address: str) -> None:
        """Keeps it alive until cancelled. Raises ConfigError where its first process cannot serve as configured."""
        self._config = self._config.replace(fleet_address=fleet_address)
        crashes = 0
        while True:
            if self._process is None:
                self.start()
            process, started_s = self._process, time.monotonic()
            assert process is not None
            ending = await self._watch(process)
            if ending is None:
                continue
            crashes = 1 if time.monotonic() - started_s > STEADY_S else crashes + 1
            self._announcer.warn(f"{self.name} {ending}; it is started again\n{process.tail()}")
            self._process = None
            await asyncio.sleep(min(MOST_PAUSE_S, 0.5 * (crashes - 1)))

    async def until_ready(self) -> Addresses:
        """Returns where it listens, once it could answer."""
        addresses = await asyncio.shield(self._listening())
        await until_ready(addresses.admin)
        return addresses

    async def restart(self) -> None:
        """Starts another process; when it serves, lets the current one finish. The state is unchanged after an error.

        Raises PeerLost where no process runs, ConfigError where the new one cannot serve.
        """
        before = self._process
        if before is None or self._next is None:
            raise PeerLost(f"{self.name} is not up; try again later")
        process = RouterProcess(self._config, self._log_path)
        try:
            await process.addresses()
        except BaseException:
            process.kill()
            raise
        if self._process is not before or self._next is None:
            process.kill()
            raise PeerLost(f"{self.name} died during its restart; it is started again")
        self._process = process
        self._next.set_result(process)
        self._replaced.add(before)
        leaving = asyncio.create_task(before.leave(HAND_OVER_S), name=f"{self.name} leaves")
        self._leaving.add(leaving)
        leaving.add_done_callback(lambda _: self._forget(leaving, before))

    async def stop(self) -> ProcessExit | None:
        """Returns how it ended; None where it was not running."""
        for leaving in self._leaving:
            leaving.cancel()
        for process in tuple(self._replaced):  # some end by themselves during the loop
            process.kill()
            await process.wait()
        if self._process is None:
            return None
        stopped_s = time.monotonic()
        is_own = await self._process.stop(GRACE_S)
        return ProcessExit(self.name, time.monotonic() - stopped_s, is_own)

    def kill(self) -> None:
        for process in (self._process, *self._replaced):
            if process is not None:
                process.kill()

    def _forget(self, leaving: asyncio.Task[None], process: RouterProcess) -> None:
        self._leaving.discard(leaving)
        if not leaving.cancelled():
            self._replaced.discard(process)

    async def _watch(self, process: RouterProcess) -> str | None:
        """Returns how the process ended, or None where another one has replaced it.

        After the first process, another program may hold a port of its own for a while.
        """
        listening = self._listening()
        try:
            addresses = await process.addresses()
        except ConfigError as error:
            if not listening.done():
                raise
            return f"could not start: {error.message}"
        if not listening.done():
            self._config = _on_ports_of(addresses, self._config)
            listening.set_result(addresses)
        self._next = asyncio.get_running_loop().create_future()
        ended = asyncio.ensure_future(process.wait())
        try:
            await asyncio.wait((ended, self._next), return_when=asyncio.FIRST_COMPLETED)
            return None if self._next.done() else f"ended with status {ended.result()}"
        finally:
            ended.cancel()
            self._next = None

    def _listening(self) -> asyncio.Future[Addresses]:
        """Returns the addresses, set by the first process; later ones have the same."""
        if self._addresses is None:
            self._addresses = asyncio.get_running_loop().create_future()
        return self._addresses


def _on_ports_of(addresses: Addresses, config: RouterConfig) -> RouterConfig:
    """Returns the config with the router's own ports fixed for later processes."""
    has_own_metrics = config.endpoints.own_metrics_port is not None
    endpoints = config.endpoints.replace(
        admin_port=_port(addresses.admin), metrics_port=_port(addresses.metrics) if has_own_metrics else None
    )
    return config.replace(endpoints=endpoints, is_restart=True)


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])
