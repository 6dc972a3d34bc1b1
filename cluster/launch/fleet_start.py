"""Starts a fleet on a Ray cluster that was joined, or adopts the one that runs there already."""

from __future__ import annotations

import time
from typing import Any

from cluster.ray import session as ray_session
from cluster.terminal.announce import Announcer
from cluster.values.placement import Node, gpus_of, unplaceable, with_gpus
from cluster.values.spec import FleetSpec
from twostroke.base.errors import ConfigError
from twostroke.config import ClusterConfig, Role, RoleConfig

PAUSE_S = 1.0
"""Seconds between two looks at Ray's nodes, which have no event here."""


class FleetStart:
    def __init__(self, config: ClusterConfig, spec: FleetSpec, announcer: Announcer) -> None:
        self._config = config
        self._spec = spec
        self._announcer = announcer

    def run(self, *, adopts_fleet: bool, has_token: bool) -> tuple[Any, str]:
        """Returns the supervisor and the fleet's token. `has_token`: the user gave the token, it was not drawn."""
        self._announcer.end()
        running = ray_session.running_supervisor() if adopts_fleet else None
        if running is not None:
            return running, self._adopt(running, has_token)
        self._until_there_is_room()
        self._announcer.begin("starting workers")
        return ray_session.create_supervisor(self._spec), self._spec.token

    def _adopt(self, running: Any, has_token: bool) -> str:
        spec = ray_session.spec_of(running)
        where = f"the fleet that runs at {self._config.address}"
        end = f"twostroke down --address {self._config.address}"
        if not spec.is_as(self._spec):
            raise ConfigError(f"{where} was started with another configuration; end it first with: {end}", field="ray")
        if has_token and spec.token != self._spec.token:
            raise ConfigError(f"{where} has another token; end it first with: {end}", field="token_file")
        if self._config.fleet_port and spec.port != self._config.fleet_port:
            raise ConfigError(
                f"{where} has its Fleet service at port {spec.port}; end it first with: {end}", field="fleet_port"
            )
        self._announcer.begin("a fleet runs here already: adopting it")
        return spec.token

    def _until_there_is_room(self) -> None:
        """Waits for nodes with room for all workers. Raises ConfigError when `ray_wait_s` is over."""
        until_s = time.monotonic() + self._config.ray_wait_s
        while True:
            nodes = ray_session.living_nodes()
            found = [
                (role, unplaceable(nodes, role, self._asked(nodes, role), count))
                for role, count in self._config.counts
                if count
            ]
            wrong = next(((role, each) for role, each in found if each is not None), None)
            if wrong is None:
                return
            role, each = wrong
            if time.monotonic() >= until_s:
                raise ConfigError(
                    f"{each.why} (--ray-wait: how long to wait for one)", field=f"{role.value}.{each.key}"
                )
            self._announcer.say_once(f"waiting: {each.why}")
            time.sleep(PAUSE_S)

    def _asked(self, nodes: list[Node], role: Role) -> RoleConfig:
        return with_gpus(nodes, self._config.role(role), gpus_of(self._config.model, role))
