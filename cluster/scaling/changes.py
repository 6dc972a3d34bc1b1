"""From who is there and how many are wanted to who comes, who leaves, and who becomes the other role. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from cluster.planner import Counts
from cluster.scaling.roster import Post, Roster
from twostroke.config import Role


def counts_of(roster: Roster, gone: Collection[str] = ()) -> Counts:
    """Workers that shall serve. Those in `gone` have left or cannot start: they do not count."""
    return Counts(len(roster.staff(Role.PREFILL, gone)), len(roster.staff(Role.DECODE, gone)))


def revised(
    roster: Roster, wanted: Counts, held: Mapping[str, int], gone: Collection[str] = (), *, may_switch: bool
) -> Roster:
    """The roster with as many of each role as are wanted.

    A worker that one role can spare, and that serves, becomes the other one where that lacks some: that takes a second,
    a new one many. Those go first that are not known to serve, then those that hold least (`held`: blocks), the
    youngest among equals. Workers in `gone` are left as they are.
    """
    now = counts_of(roster, gone)
    lacking = {Role.PREFILL: wanted.prefill - now.prefill, Role.DECODE: wanted.decode - now.decode}
    for role, other in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
        if may_switch and lacking[role] > 0 and lacking[other] < 0:
            ranked = sorted(
                _leaving_first(roster.staff(other, gone), held), key=lambda worker_id: worker_id not in held
            )
            switching = ranked[: min(lacking[role], -lacking[other])]
            for worker_id in switching:
                roster = roster.with_post(worker_id, Post(role))
            lacking[role] -= len(switching)
            lacking[other] += len(switching)
    for role, count in lacking.items():
        for worker_id in _leaving_first(roster.staff(role, gone), held)[: max(0, -count)]:
            roster = roster.with_post(worker_id, Post(role, is_retiring=True))
        for _ in range(count):
            roster = roster.with_post(roster.new_name(role), Post(role))
    return roster


def _leaving_first(staff: Sequence[str], held: Mapping[str, int]) -> list[str]:
    youngest_first = list(reversed(staff))
    return sorted(youngest_first, key=lambda worker_id: (worker_id in held, held.get(worker_id, 0)))
