"""What can go wrong, where, and when: `point:kind:count[:seconds]`."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from twostroke.base.errors import ConfigError
from twostroke.base.fault_points import Point

FROZEN_S = 10.0
"""How long a process or a link stands still where a fault does not say how long."""
ENVIRONMENT = "TWOSTROKE_FAULT"
BREAK = "TWOSTROKE_FAULT_BREAK"
"""Names a guard that is off, where faults can be armed at all."""
SURE_DRAFTS = "TWOSTROKE_FAULT_SURE_DRAFTS"
"""Is set where a draft model draws at every step of every answer, whatever that costs."""


class Kind(enum.StrEnum):
    KILL = "kill"
    """SIGKILL."""
    STOP = "stop"
    """SIGSTOP, and SIGCONT after some seconds."""
    PARTITION = "partition"
    """Nothing passes over the process's connections to others of the cluster for some seconds; they stay open, and what
    was held back arrives late."""
    SLOW = "slow"
    """Bytes over these connections are late and slow, for some seconds."""
    CORRUPT = "corrupt"
    """One bit of the next bytes of pages that leave it, or come into it, is flipped on the way."""
    TRUNCATE = "truncate"
    """The next bytes of pages end half-way, and with them the connection."""
    DUPLICATE = "duplicate"
    """The next bytes of pages are sent twice."""
    LOSE = "lose"
    """What is at hand is dropped: a batch of the event log."""
    KILL_RANK = "kill-rank"
    """SIGKILL to another rank of the worker."""
    STOP_RANK = "stop-rank"
    """SIGSTOP to another rank of the worker, which nobody wakes up."""
    CUT_RANK = "cut-rank"
    """The connection over which another rank of the worker gets its steps is cut; both processes live on."""


class Guard(enum.StrEnum):
    """What keeps faults from being noticed: switched off to prove that tests notice then."""

    FENCING = "fencing"
    """Pages stay as they were announced until their reader is done; those that were reused meanwhile are refused."""
    DIGESTS = "digests"
    """What arrived is what was sent."""
    ATTEMPTS = "attempts"
    """Decode workers refuse what is asked about an attempt that a later one has replaced."""
    RESUME = "resume"
    """Routers go on with streams that others have begun."""


@dataclass(frozen=True, slots=True)
class Fault:
    point: Point
    kind: Kind
    count: int = 1
    """It happens when the point is reached for the count-th time."""
    seconds: float = FROZEN_S

    def __str__(self) -> str:
        return f"{self.point}:{self.kind}:{self.count}:{self.seconds:g}"

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Raises ConfigError."""
        parts = text.split(":")
        if not 2 <= len(parts) <= 4:
            raise ConfigError(f"a fault is point:kind:count[:seconds], got {text!r}", field=ENVIRONMENT)
        points, kinds = [point.value for point in Point], [kind.value for kind in Kind]
        if parts[0] not in points:
            raise ConfigError(f"there is no point {parts[0]!r}; there are {', '.join(points)}", field=ENVIRONMENT)
        if parts[1] not in kinds:
            raise ConfigError(f"there is no fault {parts[1]!r}; there are {', '.join(kinds)}", field=ENVIRONMENT)
        try:
            count = int(parts[2]) if len(parts) > 2 else 1
            seconds = float(parts[3]) if len(parts) > 3 else FROZEN_S
        except ValueError as error:
            raise ConfigError(f"count and seconds of a fault are numbers, got {text!r}", field=ENVIRONMENT) from error
        if count < 1 or not 0 < seconds < math.inf:
            raise ConfigError(f"count and seconds of a fault are positive, got {text!r}", field=ENVIRONMENT)
        return cls(Point(parts[0]), Kind(parts[1]), count, seconds)
