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
import socket
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from cluster import admin_access, orders, ports, ray_environment, state_file
from cluster.announce import Announcer, fetch_with_progress
from cluster.home import Home
from cluster.router_keeper import RouterKeeper
from cluster.spec import LOOPBACK, fleet_spec, router_configs, router_ports
from twostroke.config import PACED_PREFIX, ClusterConfig
from twostroke.engine.cores import check_threads
from twostroke.engine.paced_runner import PacedSpec
from twostroke.errors import ConfigError
from twostroke.faults.injector import planned
from twostroke.kv_cache.memory import available_memory_bytes
from twostroke.models.catalog import locate
from twostroke.transfer.registry import check_names

if TYPE_CHECKING:  # loads ray, which reads its environment when it is imported
    from cluster.attendant import Attendant

INTERRUPTED = 130
CONNECT_S = 5.0
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def serve(config: ClusterConfig) -> int:
    """Serve until a signal comes. Raises ServeError if it cannot be; then nothing was left running."""
    announcer = Announcer()
    planned()  # refused here, in one line, and not by every process for itself
    for router in router_ports(config):
        for flag, port in router.by_flag().items():
            is_metrics = flag == "--metrics-port"
            ports.check((config.doors.metrics_host if is_metrics else None) or config.host, flag, port)
    if config.transports is not None:
        check_names(config.transports)
    if config.address is None:
        _check_memory(config)
        if not config.model.is_paced:
            check_threads(config.threads)
    else:
        _check_reachable(config.address)
    config = _with_absolute_model(config)
    model_dir = _model_dir(config)
    interrupts = Interrupts()
    try:
        with Home() as home:
            return _Launch(config, model_dir, home, announcer, interrupts).run()
    except (KeyboardInterrupt, SystemExit):
        announcer.say("interrupted while starting")
        return INTERRUPTED


class Interrupts:
    """Ctrl-C and SIGTERM while starting. Remembered, because a library may swallow the exception: Ray's start does."""

    def __init__(self) -> None:
        self.came = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._take)

    def check(self) -> None:
        if self.came:
            raise KeyboardInterrupt

    def _take(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.came = True
        raise KeyboardInterrupt


class _Launch:
    def __init__(
        self, config: ClusterConfig, model_dir: str, home: Home, announcer: Announcer, interrupts: Interrupts
    ) -> None:
        self._config = config
        self._interrupts = interrupts
        self._home = home
        self._announcer = announcer
        self._token = secrets.token_hex(32)
        admin_access.write_token(home.folder, self._token)
        self._fleet_port = ports.fleet_port(LOOPBACK)
        fleet_address = f"{LOOPBACK}:{self._fleet_port}"
        routers = router_configs(config, token=self._token, fleet_address=fleet_address, model_dir=model_dir)
        self._routers = [RouterKeeper(i, each, home.log_dir, announcer) for i, each in enumerate(routers)]
        self._is_ready = asyncio.Event()

    def run(self) -> int:
        is_local = self._config.address is None
        if is_local:
            ray_environment.for_local_cluster(self._token)
            # Routers need seconds to start and so does Ray: side by side. They find the fleet when there is one.
            for router in self._routers:
                router.start()
        else:
            ray_environment.for_joined_cluster()
        try:
            # Only now: Ray reads its environment when it is imported.
            from cluster import ray_session
            from cluster.attendant import Attendant

            self._announcer.say("starting Ray" if is_local else f"joining Ray at {self._config.address}")
            try:
                if self._config.address is None:
                    ray_session.start_local(self._home.ray_dir)
                else:
                    ray_session.join(self._config.address)
                self._interrupts.check()
                self._announcer.say("starting workers")
                spec = fleet_spec(self._config, token=self._token, port=self._fleet_port)
                attendant = Attendant(ray_session.create_supervisor(spec), self._announcer)
                return asyncio.run(self._attend(attendant))
            finally:
                ray_session.leave()
        finally:
            for router in self._routers:
                router.kill()

    async def _attend(self, attendant: Attendant) -> int:
        stop = self._stop_on_signal()
        if self._interrupts.came:
            stop.set()
        tasks = [
            asyncio.create_task(attendant.keep_supervisor()),
            asyncio.create_task(attendant.follow_fleet()),
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
            self._announcer.say("stopping")
            for task in (*tasks, stopping):
                task.cancel()
            await asyncio.gather(*tasks, stopping, return_exceptions=True)
            await asyncio.gather(*(router.stop() for router in self._routers))
            await attendant.stop_fleet()

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
        addresses = tuple(await asyncio.gather(*(router.until_ready() for router in self._routers)))
        state_file.write(state_file.own(addresses, self._config.model.public_name, str(self._home.folder)))
        self._announcer.ready(self._config, addresses, self._home.folder)
        self._is_ready.set()
        await asyncio.Event().wait()

    def _stop_on_signal(self) -> asyncio.Event:
        stop = asyncio.Event()

        def on_signal() -> None:
            if stop.is_set():
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
    absolute = replace(model, model=str(Path(model.model).resolve()), served_model_name=model.public_name)
    return replace(config, model=absolute)


def _model_dir(config: ClusterConfig) -> str:
    """Where the model's files are, fetched first if need be; empty for a paced model, which has none."""
    model = config.model
    if model.is_paced:
        PacedSpec.parse(model.model.removeprefix(PACED_PREFIX)).page_bytes_for(config.cache.block_size)
        return ""
    return str(locate(model.model, model.dtype) or fetch_with_progress(model.model, model.dtype))


def _check_memory(config: ClusterConfig) -> None:
    """Workers that start side by side would each find enough for itself, and none would be left for the last."""
    if config.model.device != "cpu" and not config.model.is_paced and NVIDIA_DRIVER.exists():
        return  # their pages may lie on a GPU, which only they can look at
    workers, each_bytes = config.prefill + config.decode, config.cache.host_bytes
    wanted, available = workers * each_bytes, available_memory_bytes()
    if wanted > available:
        raise ConfigError(
            f"--kv-cache-memory: {workers} workers with {each_bytes} bytes of pages each need "
            f"{wanted}, but only {available} are available",
            field="--kv-cache-memory",
        )


def _check_reachable(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"--address must be HOST:PORT of a Ray head, got {address!r}", field="--address")
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except OSError as error:
        raise ConfigError(f"--address {address}: nothing answers there: {error}", field="--address") from error
