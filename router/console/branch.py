"""The console as a branch of a router."""

from __future__ import annotations

from router.console.api import ConsoleApi
from router.console.fleet_actions import FleetActions
from router.console.pages import ConsolePages
from router.pin_admin import PinAdmin
from router.server_branch import RouterBranch, RouterParts


class Console(RouterBranch):
    def __init__(self, parts: RouterParts) -> None:
        fleet = parts.config.fleet_address, parts.membership
        pins, actions = PinAdmin(parts.handler, *fleet), FleetActions(*fleet)
        api = ConsoleApi(parts.handler, parts.recorder, actions, pins, router_id=parts.router_id)
        self.routes = (*ConsolePages().routes(), *api.routes())
