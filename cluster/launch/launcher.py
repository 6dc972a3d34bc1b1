"""`twostroke serve`: from flags to a ready server, and back to nothing.

check ports, have the model   ->  router processes ┐
                                  Ray, supervisor ┴> all workers serve, /ready says yes  ->  addresses printed
SIGINT, SIGTERM               ->  routers, workers, Ray end in this order; the cleanup process removes the rest
a second signal               ->  everything is killed
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from cluster import ports
from cluster.branches import FURTHER_MODELS
from cluster.clients import admin_access, control_socket, state_file
from cluster.fetching import fetch_with_progress
from cluster.flags.token import read as read_token
from cluster.launch.run_folder import RunFolder
from cluster.launch.start_checks import check, check_machine, cpus
from cluster.ray import environment as ray_environment
from cluster.ray.address import ray_head_address
from cluster.routers.client_ports import ClientPorts
from cluster.routers.keeper import RouterKeeper
from cluster.terminal.announce import Announcer
from cluster.values.exits import described as describe_exits
from cluster.values.spec import LOOPBACK, fleet_spec, router_configs
from twostroke.base.errors import ConfigError
from twostroke.config import PACED_PREFIX, ClusterConfig
from twostroke.engine.backends.paced.runner import PacedSpec
from twostroke.models.catalog.places import locate
from twostroke.models.checks.preflight import check_model

if TYPE_CHECKING:  # loads ray, which reads its environment when it is imported
    from cluster.launch.supervisor_client import SupervisorClient

INTERRUPTED = 130
OF_SUPERVISOR = ("drain", "assign_role", "sleep", "wake_up", "reload", "scale", "scaling")
"""Methods of `Supervisor` that commands may call over the control socket."""


def serve(config: ClusterConfig) -> int:
    """Serves until a signal comes. Raises ServeError where that is impossible; then nothing is left running."""
    return _launch(config, LaunchOptions())


def up(config: ClusterConfig, *, keeps: bool) -> int:
    """Serves as `serve` does, but adopts a fleet that already runs with this configuration."""
    return _launch(config, LaunchOptions(adopts_fleet=True, keeps_fleet=keeps))


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    adopts_fleet: bool = False
    """Whether a running fleet is adopted where it was started with the same configuration."""
    keeps_fleet: bool = False
    """Whether workers and supervisor keep running when the launcher ends."""


def _launch(config: ClusterConfig, options: LaunchOptions) -> int:
    announcer = Announcer()
    check(config)
    check_machine(config)
    token = None if config.token_file is None else read_token(config.token_file)
    if config.address is None and options.keeps_fleet:
        raise ConfigError("--keep needs --address: a local Ray ends with its launcher", field="--keep")
    if config.address is not None:
        config = config.replace(address=ray_head_address(config.address, config.ray_wait_s, announcer))
    config = _with_absolute_model(config)
    model_dir = _model_dir(config) if config.routers or config.address is None else ""
    interrupts = Interrupts()
    try:
        with RunFolder() as folder, contextlib.closing(ClientPorts(config.listen, config.routers)) as ports:
            return _Launch(config, options, token, model_dir, folder, ports, announcer, interrupts).run()
    except (KeyboardInterrupt, SystemExit):
        announcer.say("interrupted while starting")
        return INTERRUPTED
    finally:
        announcer.end()


class Interrupts:
    """Handles Ctrl-C and SIGTERM during the start; `came` remembers them, as Ray swallows the exception."""

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
    """Prints nothing about an interrupt that Python itself swallows, for example while it forks."""
    if not issubclass(happened.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(happened)


@dataclass(slots=True)
class _Launch:
    config: ClusterConfig
    options: LaunchOptions
    token: str | None
    """The fleet's token, if the user gave one."""
    model_dir: str
    folder: RunFolder
    ports: ClientPorts
    announcer: Announcer
    interrupts: Interrupts
    routers: list[RouterKeeper] = field(default_factory=list)
    is_ready: asyncio.Event = field(default_factory=asyncio.Event)

    def run(self) -> int:
        is_local = self.config.address is None
        spec = fleet_spec(
            self.config,
            token=self.token or secrets.token_hex(32),
            port=self.config.fleet_port or ports.fleet_port(LOOPBACK),
        )
        if is_local:
            admin_access.write_token(self.folder.path, spec.token)
            ray_environment.for_local_cluster(admin_access.write_ray_token(self.folder.path, spec.token))
            # Routers and Ray take seconds to start, so they start side by side. Routers wait for the fleet.
            self._make_routers(spec.token, f"{LOOPBACK}:{spec.port}")
            for router in self.routers:
                router.start()
        else:
            ray_environment.for_joined_cluster(outlives_node=True)
        try:
            # Imported here, because Ray reads its environment when it is imported.
            from cluster.launch import fleet_start
            from cluster.launch.supervisor_client import SupervisorClient
            from cluster.ray import session as ray_session

            self.announcer.begin("starting Ray" if is_local else f"joining Ray at {self.config.address}")
            try:
                if self.config.address is None:
                    ray_session.start_local(self.folder.ray_dir, cpus(self.config))
                else:
                    ray_session.join(self.config.address, self.config.ray_wait_s)
                self.interrupts.check()
                start = fleet_start.FleetStart(self.config, spec, self.announcer)
                actor, token = start.run(adopts_fleet=self.options.adopts_fleet, has_token=self.token is not None)
                if not is_local:
                    admin_access.write_token(self.folder.path, token)
                    self._make_routers(token, "")
                return asyncio.run(self._follow(SupervisorClient(actor, self.announcer, self.config.address)))
            finally:
                ray_session.leave()
        finally:
            for router in self.routers:
                router.kill()

    def _make_routers(self, token: str, fleet_address: str) -> None:
        """Creates the keepers. `fleet_address` is empty where it is not known yet."""
        configs = router_configs(self.config, token=token, fleet_address=fleet_address, model_dir=self.model_dir)
        self.routers = [RouterKeeper(config, self.ports, self.folder.log_dir, self.announcer) for config in configs]

    async def _follow(self, supervisor: SupervisorClient) -> int:
        stop = self._stop_on_signal()
        if self.interrupts.came:
            stop.set()
        tasks = [
            asyncio.create_task(supervisor.follow()),
            *(asyncio.create_task(self._keep_router(router, supervisor)) for router in self.routers),
            asyncio.create_task(self._announce_when_ready(supervisor)),
            asyncio.create_task(self._serve_control_socket(supervisor)),
        ]
        stopping = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises what went wrong
            return 0 if self.is_ready.is_set() else INTERRUPTED
        finally:
            self.announcer.begin("leaving the fleet to itself" if self.options.keeps_fleet else "stopping")
            for task in (*tasks, stopping):
                task.cancel()
            await asyncio.gather(*tasks, stopping, return_exceptions=True)
            self.ports.close()  # who connects over gRPC from here on is refused, and does not wait
            stopped_s = time.monotonic()
            of_routers = await asyncio.gather(*(router.stop() for router in self.routers))
            exits = [ending for ending in of_routers if ending is not None]
            if not self.options.keeps_fleet:
                exits += await supervisor.stop_fleet()
            self.announcer.say(describe_exits(exits, time.monotonic() - stopped_s))

    async def _keep_router(self, router: RouterKeeper, supervisor: SupervisorClient) -> None:
        """Keeps one router alive. This ends only by cancellation or failure."""
        await router.keep(await supervisor.fleet_address())

    async def _serve_control_socket(self, supervisor: SupervisorClient) -> None:
        """Serves the control socket. This ends only by cancellation or failure."""
        routers = {router.name: router for router in self.routers}

        async def processes() -> dict[str, list[str]]:
            return {"workers": await supervisor.workers(), "routers": list(routers)}

        async def restart_router(name: str) -> None:
            await routers[name].restart()
            self.announcer.say(f"{name} was restarted; the process before finishes its streams")

        handlers: dict[str, control_socket.Handler] = {
            **{method: partial(supervisor.ask, method) for method in OF_SUPERVISOR},
            "processes": processes,
            "restart_router": restart_router,
            "restart_supervisor": supervisor.restart_supervisor,
        }
        async with control_socket.serving_socket(self.folder.path, handlers):
            await asyncio.Event().wait()

    async def _announce_when_ready(self, supervisor: SupervisorClient) -> None:
        """Prints the banner once everything serves. This ends only by cancellation or failure."""
        await supervisor.until_all_serve()
        self.announcer.begin("waiting for the routers")
        addresses = tuple(await asyncio.gather(*(router.until_ready() for router in self.routers)))
        own = state_file.own(
            addresses,
            self.config.model.public_name,
            str(self.folder.path),
            has_tls=self.config.certificates.clients is not None,
        )
        state_file.write(own)
        self.announcer.ready(self.config, addresses, self.folder.path, self.model_dir)
        self.is_ready.set()
        await asyncio.Event().wait()

    def _stop_on_signal(self) -> asyncio.Event:
        stop = asyncio.Event()

        def on_signal() -> None:
            if stop.is_set():
                self.announcer.end()
                # The kernel ends Ray's processes and the routers with this one; the cleanup process does the rest.
                os._exit(INTERRUPTED)
            stop.set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, on_signal)
        return stop


def _with_absolute_model(config: ClusterConfig) -> ClusterConfig:
    """Makes the paths of models absolute, because workers have another directory; public names stay the same."""
    model = config.model
    for further in FURTHER_MODELS:
        config = further.with_absolute_path(config)
    if model.is_paced or not Path(model.model).exists():
        return config
    absolute = model.replace(model=str(Path(model.model).resolve()), served_model_name=model.public_name)
    return config.replace(model=absolute)


def _model_dir(config: ClusterConfig) -> str:
    """Returns the folder of the model's files, fetched first if need be; empty for a paced model, which has none."""
    model = config.model
    if model.is_paced:
        PacedSpec.parse(model.model.removeprefix(PACED_PREFIX)).page_bytes_for(config.cache.block_size)
        return ""
    directory = locate(model.model, model.dtype) or fetch_with_progress(model.model, model.dtype)
    check_model(directory, model)
    for further in FURTHER_MODELS:
        further.fetch_and_check(config, directory, fetch_with_progress)
    return str(directory)
