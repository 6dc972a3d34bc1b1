"""What a simulated worker needs of its work loop and of its pull client, live ones or simulated ones."""

from __future__ import annotations

from typing import Protocol

from tools.simulate.fleet.worker.steps import Flight, StepWatch
from twostroke.scheduler.cost import StepCost
from twostroke.worker.measured.link_rates import LinkRates
from twostroke.worker.role_host import Loop, Pulls, RoleHandlers
from twostroke.worker.steps.stream_steps import StreamSteps


class HostPulls(Pulls, Protocol):
    """A pull client, and what serves the pulls of others."""

    links: LinkRates

    def __len__(self) -> int: ...

    def announce(self) -> None:
        """Tells whoever pulls blocks from here that some may have become readable."""

    def break_off(self) -> None:
        """Ends all pulls: the worker has died, and its peers have noticed."""


class HostLoop(Loop, Protocol):
    @property
    def cost(self) -> StepCost:
        """What steps cost, as far as the worker knows."""

    @property
    def stream_steps(self) -> StreamSteps: ...

    def run(self, role: RoleHandlers, watch: StepWatch) -> None:
        """Works for the role from now on."""

    def stop(self) -> Flight | None:
        """Ends the loop, since the worker dies. Returns what has run of the steps under way."""
