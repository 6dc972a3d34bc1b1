"""Baselines for `kv`: policies of every load balancer, which know only load, or nothing."""

from __future__ import annotations

from collections.abc import Callable

from router.routing.forecast import decide
from router.routing.policy import Decision, Snapshot, WorkerView

Load = Callable[[WorkerView], tuple[float, ...]]


def choose_round_robin(snapshot: Snapshot) -> Decision:
    """Takes the next decode worker and the next prefill worker in turn."""
    decode = snapshot.decode[snapshot.turn % len(snapshot.decode)]
    source = snapshot.prefill[snapshot.turn % len(snapshot.prefill)] if snapshot.prefill else None
    return decide(snapshot, decode, source)


def choose_randomly(snapshot: Snapshot) -> Decision:
    """Takes a random pair. One draw chooses both workers."""
    decode, rest = _drawn(snapshot.decode, snapshot.draw)
    return decide(snapshot, decode, _drawn(snapshot.prefill, rest)[0] if snapshot.prefill else None)


def choose_of_two(snapshot: Snapshot) -> Decision:
    """Draws two workers and takes the one with fewer requests (Mitzenmacher, "The power of two choices", 2001)."""
    decode, rest = _better_of_two(snapshot.decode, snapshot.draw)
    return decide(snapshot, decode, _better_of_two(snapshot.prefill, rest)[0] if snapshot.prefill else None)


def choose_least_requests(snapshot: Snapshot) -> Decision:
    """Takes the worker with fewest requests, then fewest tokens to compute; equals take turns."""
    return by_load(snapshot, lambda view: (view.requests, view.queued_tokens))


def choose_least_tokens(snapshot: Snapshot) -> Decision:
    """Takes the worker with fewest tokens to compute, then fewest requests; equals take turns."""
    return by_load(snapshot, lambda view: (view.queued_tokens, view.requests))


def by_load(snapshot: Snapshot, load: Load) -> Decision:
    """Takes the least loaded worker of each role."""
    source = least(snapshot.prefill, load, snapshot.turn) if snapshot.prefill else None
    return decide(snapshot, least(snapshot.decode, load, snapshot.turn), source)


def least(views: tuple[WorkerView, ...], load: Load, turn: int) -> WorkerView:
    """Returns the least loaded worker; equals take turns."""
    first = turn % len(views)
    return min(views[first:] + views[:first], key=load)


def lightest_decode(snapshot: Snapshot) -> WorkerView:
    """Returns the decode worker with fewest requests, then fewest pages: for policies that choose only page sources."""
    return least(snapshot.decode, lambda view: (view.requests, view.pages_active), snapshot.turn)


def _drawn(views: tuple[WorkerView, ...], draw: float) -> tuple[WorkerView, float]:
    """Returns one of them, and a new draw: the fraction that is left of the old one."""
    place, rest = divmod(draw * len(views), 1.0)
    return views[int(place)], rest


def _better_of_two(views: tuple[WorkerView, ...], draw: float) -> tuple[WorkerView, float]:
    first, rest = _drawn(views, draw)
    others = tuple(view for view in views if view is not first)
    if not others:
        return first, rest
    second, rest = _drawn(others, rest)
    return min(first, second, key=lambda view: view.requests), rest
