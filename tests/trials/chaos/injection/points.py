"""Which faults make sense where: what the matrix runs, and in one line each why it leaves out the rest. Pure."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from tests.trials.chaos.injection.plan import Kind
from twostroke.base.fault_points import Point


class Process(enum.StrEnum):
    """Kinds of processes that come to points."""

    ROUTER = "router"
    DECODE = "decode"
    PREFILL = "prefill"
    SUPERVISOR = "supervisor"


_WORKERS = frozenset({Process.DECODE, Process.PREFILL})
_BY_PREFIX = {
    "router": frozenset({Process.ROUTER}),
    "decode": frozenset({Process.DECODE}),
    "prefill": frozenset({Process.PREFILL}),
    "supervisor": frozenset({Process.SUPERVISOR}),
    "pull": _WORKERS,  # prefill workers pull too: from the peer that holds a prompt's first blocks
    "pages": _WORKERS,  # decode workers serve too: as that peer
    "tier": _WORKERS,
    "pin": _WORKERS,
    "worker": _WORKERS,
    "transport": _WORKERS,
}
_BY_POINT = {
    Point.TIER_LOADING: frozenset({Process.DECODE}),
    Point.TIER_LOADED: frozenset({Process.DECODE}),
}
"""What comes back lies on decode workers in the matrix, so prefill workers load nothing there."""
OF_RANKS = frozenset({Kind.KILL_RANK, Kind.STOP_RANK, Kind.CUT_RANK})
"""Faults of another rank than the first one of a worker."""
OF_FIRST_RANKS = frozenset({Kind.KILL, Kind.STOP, Kind.PARTITION})
"""The same faults of the process that has all connections to others, which is a worker's first rank."""

REACHED_BY: Mapping[Point, frozenset[Process]] = {
    point: _BY_POINT.get(point, _BY_PREFIX[point.value.partition(".")[0]]) for point in Point
}

EVENTS = frozenset({Point.WORKER_EVENTS, Point.ROUTER_EVENTS})
"""A batch of an event log is at hand."""
BEFORE_READING = frozenset(
    {Point.PULL_ASKING, Point.PULL_ANNOUNCED, Point.TRANSPORT_CONNECTING, Point.TRANSPORT_ASKING}
)
"""Pages are about to come into the process."""
BEFORE_SERVING = frozenset(
    {
        Point.PAGES_ASKED,
        Point.PAGES_ACCEPTED,
        Point.PAGES_ANNOUNCING,
        Point.PREFILL_ADMITTED,
        Point.TRANSPORT_GREETED,
        Point.TRANSPORT_SERVING,
    }
)
"""Pages are about to leave the process."""
OVER_SOCKETS = frozenset({Point.TRANSPORT_SERVING, Point.TRANSPORT_SENT})
"""Only owners that send pages come here."""
SPOILING = frozenset({Kind.CORRUPT, Kind.TRUNCATE, Kind.DUPLICATE})
"""What can be done to pages on their way."""
SAME_HOST = frozenset({"shm", "cuda_ipc"})
"""Transports whose readers copy out of the owner's memory."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One fault at one point in one kind of process."""

    process: Process
    point: Point
    kind: Kind

    def __str__(self) -> str:
        return f"{self.process}/{self.point}/{self.kind}"


def cells(transport: str = "tcp", ranks: int = 1) -> list[Cell]:
    """All that make sense where pages travel over `transport`; with several ranks, what hits a rank of a worker."""
    everything = (Cell(*each) for each in itertools.product(Process, Point, Kind))
    return [cell for cell in everything if why_not(cell, transport, ranks) is None]


def why_not(cell: Cell, transport: str = "tcp", ranks: int = 1) -> str | None:
    """Why this makes no sense; None where it does."""
    process, point, kind = cell.process, cell.point, cell.kind
    if process not in REACHED_BY[point]:
        return f"a {process} never comes to {point}"
    if ranks == 1 and kind in OF_RANKS:
        return "workers of one rank have no other"
    if ranks > 1 and process not in _WORKERS:
        return f"a {process} has no ranks"
    if ranks > 1 and kind not in OF_RANKS | OF_FIRST_RANKS:
        return "it hits connections, events or pages, and the first rank alone has these: see workers of one rank"
    if point in OVER_SOCKETS and transport in SAME_HOST:
        return f"over {transport} nothing of the owner runs while its pages are read"
    if kind is Kind.LOSE and point not in EVENTS:
        return "no batch of an event log is at hand"
    if kind in SPOILING:
        return _why_not_corrupt(cell, transport)
    return None


def _why_not_corrupt(cell: Cell, transport: str) -> str | None:
    if not REACHED_BY[cell.point] <= _WORKERS:
        return f"no pages pass through a {cell.process}"
    if cell.point not in BEFORE_READING | BEFORE_SERVING:
        return (
            "no page of what is at hand is about to travel: it would hit some other request, as at pull.* and pages.*"
        )
    if transport not in SAME_HOST:
        return None
    if cell.kind is not Kind.CORRUPT:
        return f"over {transport} there are no frames"
    if cell.point in BEFORE_SERVING:
        return f"over {transport} the reader makes the copy that can be spoilt: see pull.* and transport.asking"
    return None
