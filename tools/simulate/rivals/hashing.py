"""Consistent hashing of conversations, as proxies that know nothing of caches do it."""

from __future__ import annotations

import bisect
import hashlib
import math

from router.routing.forecast import decide
from router.routing.policies.baselines import least, lightest_decode
from router.routing.policy import Decision, Snapshot, WorkerView
from twostroke.base.ids import WorkerId

RING_POINTS = 64
"""Places of each worker on the ring, so that shares differ by about an eighth."""
BOUND = 1.25
"""Most requests on one worker, as a multiple of the average."""
SESSION_BLOCKS = 2
"""A conversation is known by its first blocks: system prompts are often one block, shared by all."""


def choose_by_hash(snapshot: Snapshot) -> Decision:
    """Takes the page source at which the conversation's first blocks fall on a ring, and passes over full ones.

    This is Mirrokni et al., "Consistent hashing with bounded loads", 2018. The decode worker has the fewest requests.
    """
    decode = lightest_decode(snapshot)
    if not snapshot.prefill or not snapshot.block_hashes:
        return decide(snapshot, decode, least(snapshot.prefill, _requests, snapshot.turn) if snapshot.prefill else None)
    ring = sorted(
        (_point(f"{view.worker}/{i}".encode()), view.worker) for view in snapshot.prefill for i in range(RING_POINTS)
    )
    views = {view.worker: view for view in snapshot.prefill}
    most = math.ceil(BOUND * (sum(view.requests for view in snapshot.prefill) + 1) / len(snapshot.prefill))
    start = bisect.bisect(ring, (_point(snapshot.block_hashes[:SESSION_BLOCKS][-1]), WorkerId("")))
    around = (views[ring[(start + step) % len(ring)][1]] for step in range(len(ring)))
    return decide(snapshot, decode, next(view for view in around if view.requests < most))


def _requests(view: WorkerView) -> tuple[float, ...]:
    return (view.requests,)


def _point(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
