"""`twostroke serve`: from flags to a ready server, and back to nothing.

check ports, have the model   ->  router processes ┐
                                  Ray, supervisor ┴> all workers serve, /ready says yes  ->  addresses printed
SIGINT, SIGTERM               ->  routers, workers, Ray end in this order; the janitor takes the rest
a second signal               ->  everything is killed
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from cluster import admin_access, orders, ports, ray_environment, state_file
from cluster.announce import Announcer
from cluster.endings import described as endings_described
from cluster.fetching import fetch_with_progress
from cluster.flags.token import read as read_token
from cluster.home import Home
from cluster.ray_address import reachable
from cluster.router_keeper import RouterKeeper
from cluster.spec import LOOPBACK, fleet_spec, router_configs
from cluster.start_checks import check, check_machine, cpus
from twostroke.config import PACED_PREFIX, ClusterConfig
from twostroke.engine.paced_runner import PacedSpec
from twostroke.errors import ConfigError
from twostroke.models.catalog import locate

if TYPE_CHECKING:  # loads ray, which reads its environment when it is imported
    from cluster.attendant import Attendant

INTERRUPTED = 130


def serve(config: ClusterConfig) -> int:
    """Serve until a signal comes. Raises ServeError if it cannot be; then nothing was left running."""
    return _launch(config, Manner())


def up(config: ClusterConfig, *, keeps: bool) -> int:
    """The same, but for a fleet that runs already with this configuration: that one is taken over."""
    return _launch(config, Manner(takes_over=True, keeps=keeps))


@dataclass(frozen=True, slots=True)
class Manner:
    takes_over: bool = False
    """A fleet that runs already is gone on with, where it was started with the same configuration."""
    keeps: bool = False
    """Workers and supervisor go on when the launcher ends."""


def _launch(config: ClusterConfig, manner: Manner) -> int:
    announcer = Announcer()
    check(config)
    check_machine(config)
    token = None if config.token_file is None else read_token(config.token_file)
    if config.address is None and manner.keeps:
        raise ConfigError("--keep needs --address: a local Ray ends with its launcher", field="--keep")
    if config.address is not None:
        config = config.replace(address=reachable(config.address, config.ray_wait_s, announcer))
    config = _with_absolute_model(config)
    model_dir = _model_dir(config) if config.routers or config.address is None else ""
    interrupts = Interrupts()
    try:
        with Home() as home:
            return _Launch(config, manner, token, model_dir, home, announcer, interrupts).run()
    except (KeyboardInterrupt, SystemExit):
        announcer.say("interrupted while starting")
        return INTERRUPTED
    finally:
        announcer.end()


class Interrupts:
    """Ctrl-C and SIGTERM while starting. Remembered, because a library may swallow the exception: Ray's start does."""

    def __init__(self) -> None:
        self.came = False
        sys.unraisablehook = _tell_unless_interrupt
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._take)

    def check(self) -> None:
        if self.came:
            raise KeyboardInterrupt

    def _take(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.came = True
        raise KeyboardInterrupt


def _tell_unless_interrupt(happened: sys.UnraisableHookArgs) -> None:
    """Of what Python itself swallows: a signal that comes while it forks or frees something. `came` has it."""
    if not issubclass(happened.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(happened)


class _Launch:
    def __init__(
        self,
        config: ClusterConfig,
        manner: Manner,
        token: str | None,
        model_dir: str,
        home: Home,
        announcer: Announcer,
        interrupts: Interrupts,
    ) -> None:
        self._config = config
        self._manner = manner
        self._given_token = token
        self._model_dir = model_dir
        self._interrupts = interrupts
        self._home = home
        self._announcer = announcer
        self._routers: list[RouterKeeper] = []
        self._is_ready = asyncio.Event()

    def run(self) -> int:
        is_local = self._config.address is None
        spec = fleet_spec(
            self._config,
            token=self._given_token or secrets.token_hex(32),
            port=self._config.fleet_port or ports.fleet_port(LOOPBACK),
        )
        if is_local:
            ray_environment.for_local_cluster(admin_access.write_token(self._home.folder, spec.token))
            # Routers need seconds to start and so does Ray: side by side. They find the fleet when there is one.
            self._make_routers(spec.token, f"{LOOPBACK}:{spec.port}")
            for router in self._routers:
                router.start()
        else:
            ray_environment.for_joined_cluster(outlives_node=True)
        try:
            # Only now: Ray reads its environment when it is imported.
            from cluster import fleet_start, ray_session
            from cluster.attendant import Attendant

            self._announcer.begin("starting Ray" if is_local else f"joining Ray at {self._config.address}")
            try:
                if self._config.address is None:
                    ray_session.start_local(self._home.ray_dir, cpus(self._config))
                else:
                    ray_session.join(self._config.address, self._config.ray_wait_s)
                self._interrupts.check()
                start = fleet_start.FleetStart(self._config, spec, self._announcer)
                supervisor, token = start.run(
                    takes_over=self._manner.takes_over, has_token=self._given_token is not None
                )
                if not is_local:
                    admin_access.write_token(self._home.folder, token)
                    self._make_routers(token, "")
                return asyncio.run(self._attend(Attendant(supervisor, self._announcer, self._config.address)))
            finally:
                ray_session.leave()
        finally:
            for router in self._routers:
                router.kill()

    def _make_routers(self, token: str, fleet_address: str) -> None:
        """`fleet_address`: where it is known already."""
        configs = router_configs(self._config, token=token, fleet_address=fleet_address, model_dir=self._model_dir)
        self._routers = [
            RouterKeeper(index, config, self._home.log_dir, self._announcer) for index, config in enumerate(configs)
        ]

    async def _attend(self, attendant: Attendant) -> int:
        stop = self._stop_on_signal()
        if self._interrupts.came:
            stop.set()
        tasks = [
            asyncio.create_task(attendant.attend()),
            *(asyncio.create_task(self._keep_router(router, attendant)) for router in self._routers),
            asyncio.create_task(self._announce_when_ready(attendant)),
            asyncio.create_task(self._take_orders(attendant)),
        ]
        stopping = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises what went wrong
            return 0 if self._is_ready.is_set() else INTERRUPTED
        finally:
            self._announcer.begin("leaving the fleet to itself" if self._manner.keeps else "stopping")
            for task in (*tasks, stopping):
                task.cancel()
            await asyncio.gather(*tasks, stopping, return_exceptions=True)
            told_s = time.monotonic()
            of_routers = await asyncio.gather(*(router.stop() for router in self._routers))
            endings = [ending for ending in of_routers if ending is not None]
            if not self._manner.keeps:
                endings += await attendant.stop_fleet()
            self._announcer.say(endings_described(endings, time.monotonic() - told_s))

    async def _keep_router(self, router: RouterKeeper, attendant: Attendant) -> None:
        """Ends only by cancellation or failure."""
        await router.keep(await attendant.fleet_address())

    async def _take_orders(self, attendant: Attendant) -> None:
        """Ends only by cancellation or failure."""
        routers = {router.name: router for router in self._routers}

        async def processes() -> dict[str, list[str]]:
            return {"workers": await attendant.workers(), "routers": list(routers)}

        async def restart_router(name: str) -> None:
            await routers[name].restart()
            self._announcer.say(f"{name} begins another life; the one before finishes what it has")

        known: dict[str, orders.Order] = {
            "processes": processes,
            "drain": attendant.drain,
            "assign_role": attendant.assign_role,
            "scale": attendant.scale,
            "scaling": attendant.scaling,
            "restart_router": restart_router,
            "restart_supervisor": attendant.restart_supervisor,
        }
        async with orders.taking(self._home.folder, known):
            await asyncio.Event().wait()

    async def _announce_when_ready(self, attendant: Attendant) -> None:
        """Ends only by cancellation or failure."""
        await attendant.until_all_serve()
        self._announcer.begin("waiting for the routers")
        addresses = tuple(await asyncio.gather(*(router.until_ready() for router in self._routers)))
        own = state_file.own(
            addresses,
            self._config.model.public_name,
            str(self._home.folder),
            has_tls=self._config.certificates.clients is not None,
        )
        state_file.write(own)
        self._announcer.ready(self._config, addresses, self._home.folder, self._model_dir)
        self._is_ready.set()
        await asyncio.Event().wait()

    def _stop_on_signal(self) -> asyncio.Event:
        stop = asyncio.Event()

        def on_signal() -> None:
            if stop.is_set():
                self._announcer.end()
                # Ray's processes and the routers are bound to this one by the kernel; the janitor does the rest.
                os._exit(INTERRUPTED)
            stop.set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, on_signal)
        return stop


def _with_absolute_model(config: ClusterConfig) -> ClusterConfig:
    """Workers do not stand where the user stands; clients still call the model what the user called it."""
    model = config.model
    if model.is_paced or not Path(model.model).is_dir():
        return config
    absolute = model.replace(model=str(Path(model.model).resolve()), served_model_name=model.public_name)
    return config.replace(model=absolute)


def _model_dir(config: ClusterConfig) -> str:
    """Where the model's files are, fetched first if need be; empty for a paced model, which has none."""
    model = config.model
    if model.is_paced:
        PacedSpec.parse(model.model.removeprefix(PACED_PREFIX)).page_bytes_for(config.cache.block_size)
        return ""
    return str(locate(model.model, model.dtype) or fetch_with_progress(model.model, model.dtype))
