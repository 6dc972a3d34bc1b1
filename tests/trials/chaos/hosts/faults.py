"""What happens to hosts and their cables, and how long a stream may wait then. Pure."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from tests.trials.chaos.hosts.network import Host

CRASH_S, CUT_S = 3.0, 8.0
"""Most seconds until the next token of every open stream: where connections end, and where nothing is heard."""
HELD_S = 8.0
"""Longer than Ray needs to take a node for dead: its workers are elsewhere when it comes back."""
BRIEF_S = 2.7
"""Longer than routers wait, and too short for Ray to take a node for dead."""
AWAY_S = 2.0
"""A machine that reboots at once."""
GCS = "/gcs_server"


class Victim(enum.StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    HEAD = "head"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFault:
    name: str
    victim: Victim
    strike: Callable[[Host], None]
    mend: Callable[[Host], None]
    held_s: float = HELD_S
    """Between the two."""
    bound_s: float | None = CUT_S
    """None: nobody can say, or what is measured is not."""
    ends_epochs: bool = True
    """The epochs of the workers there end: others take their places."""
    takes_routers: bool = False
    """Clients have to try again until they are back, and go on."""

    def __str__(self) -> str:
        return f"{self.victim}: {self.name}"


def nothing(host: Host) -> None:
    """Its services begin again by themselves."""
    del host


def _frozen(victim: Victim) -> HostFault:
    return HostFault(name="frozen and thawed", victim=victim, strike=Host.freeze, mend=Host.thaw)


def _cut(victim: Victim) -> HostFault:
    return HostFault(name="cable pulled and plugged in", victim=victim, strike=Host.pull_cable, mend=Host.plug_in)


def _crashed(victim: Victim) -> HostFault:
    return HostFault(name="crashed and booted", victim=victim, strike=Host.crash, mend=Host.boot, bound_s=CRASH_S)


CUT_DECODE = _cut(Victim.DECODE)
HEAD_KILLED = HostFault(
    name="Ray's head killed and restarted",
    victim=Victim.HEAD,
    strike=lambda host: host.kill(GCS),
    mend=nothing,
    bound_s=CRASH_S,
    ends_epochs=False,
)
FAULTS = (
    CUT_DECODE,
    HostFault(
        name="cable loose for a moment",
        victim=Victim.DECODE,
        strike=Host.pull_cable,
        mend=Host.plug_in,
        held_s=BRIEF_S,
        ends_epochs=False,
    ),
    _cut(Victim.PREFILL),
    _crashed(Victim.DECODE),
    _crashed(Victim.PREFILL),
    HostFault(name="powered off and on", victim=Victim.DECODE, strike=Host.power_off, mend=Host.power_on),
    _frozen(Victim.DECODE),
    _frozen(Victim.PREFILL),
    HEAD_KILLED,
    HostFault(
        name="crashed and booted, with all routers",
        victim=Victim.HEAD,
        strike=Host.crash,
        mend=Host.boot,
        held_s=AWAY_S,
        bound_s=None,
        ends_epochs=False,
        takes_routers=True,
    ),
)
