"""Policies that ignore what workers hold: yardsticks for those that do not."""

from __future__ import annotations

from router.forecast import decide
from router.policy import Decision, Snapshot, WorkerView


def choose_round_robin(snapshot: Snapshot) -> Decision:
    """Workers take turns."""
    decode = snapshot.decode[snapshot.turn % len(snapshot.decode)]
    source = snapshot.prefill[snapshot.turn % len(snapshot.prefill)] if snapshot.prefill else None
    return decide(snapshot, decode, source)


def choose_randomly(snapshot: Snapshot) -> Decision:
    """One draw picks the pair, uniformly."""
    pair = int(snapshot.draw * len(snapshot.decode) * max(1, len(snapshot.prefill)))
    decode = snapshot.decode[pair % len(snapshot.decode)]
    source = snapshot.prefill[pair // len(snapshot.decode)] if snapshot.prefill else None
    return decide(snapshot, decode, source)


def choose_least_requests(snapshot: Snapshot) -> Decision:
    """Fewest requests, then fewest tokens to compute; equals take turns."""
    return decide(
        snapshot,
        _least_loaded(snapshot.decode, snapshot.turn),
        _least_loaded(snapshot.prefill, snapshot.turn) if snapshot.prefill else None,
    )


def _least_loaded(views: tuple[WorkerView, ...], turn: int) -> WorkerView:
    first = turn % len(views)
    return min(views[first:] + views[:first], key=lambda view: (view.requests, view.queued_tokens))
