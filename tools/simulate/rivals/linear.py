"""Other systems' policies that weigh cached blocks against load in one formula, in blocks or tokens."""

from __future__ import annotations

from router.routing.forecast import decide
from router.routing.policies.baselines import least, lightest_decode
from router.routing.policy import Decision, Snapshot, WorkerView


class DynamoLinear:
    """NVIDIA Dynamo's KV router (lib/kv-router/src/scheduling/selector/default.rs): blocks to prefill there, less what
    is cached, plus blocks in use. On decode workers only blocks in use count, as it does with split roles.

    `overlap` is its overlap credit, 1 by default; more makes it stickier.
    """

    HOST = 0.75
    DISK = 0.25

    def __init__(self, overlap: float = 1.0) -> None:
        self._overlap = overlap

    def __call__(self, snapshot: Snapshot) -> Decision:
        decode = least(snapshot.decode, lambda view: (view.pages_active,), snapshot.turn)
        if not snapshot.prefill:
            return decide(snapshot, decode, None)
        return decide(
            snapshot, decode, least(snapshot.prefill, lambda view: (self._cost(snapshot, view),), snapshot.turn)
        )

    def _cost(self, snapshot: Snapshot, view: WorkerView) -> float:
        device, *lower = view.depths
        credit = self._overlap * device
        for weight, depth in zip((self.HOST, self.DISK), lower, strict=False):
            credit += weight * (depth - device)
            device = depth
        blocks = (view.queued_tokens + snapshot.known_tokens) / snapshot.block_size
        return max(blocks - credit, 0.0)


class LMetric:
    """Tokens of this prompt to compute there, times requests there (arXiv 2603.15202): a product needs no weights."""

    def __call__(self, snapshot: Snapshot) -> Decision:
        def score(view: WorkerView) -> tuple[float, ...]:
            tokens = max(1, snapshot.known_tokens - view.cached_blocks * snapshot.block_size)
            return (tokens * (view.requests + 1), view.queued_tokens)

        decode = lightest_decode(snapshot)
        return decide(snapshot, decode, least(snapshot.prefill, score, snapshot.turn) if snapshot.prefill else None)
