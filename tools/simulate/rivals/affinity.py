"""Other systems' policies that send a prompt where its prefix is, each with its own rule against imbalance."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from router.routing.forecast import UNKNOWN_COST, decide
from router.routing.policies.baselines import least, lightest_decode
from router.routing.policy import Decision, Snapshot, WorkerView
from twostroke.base.ids import BlockHash, WorkerId


class History:
    """What this router sent where: all that policies know that do not listen to workers.

    It keeps, per worker, the blocks of the latest requests; the least recently sent are forgotten.
    """

    def __init__(self, most_blocks: int | None = None) -> None:
        self._most_blocks = most_blocks
        self._sent: dict[WorkerId, OrderedDict[BlockHash, None]] = {}

    def matched(self, worker: WorkerId, hashes: Sequence[BlockHash]) -> int:
        """Returns how many of the first blocks were sent there."""
        sent = self._sent.get(worker)
        if not sent:
            return 0
        return next((depth for depth, block_hash in enumerate(hashes) if block_hash not in sent), len(hashes))

    def size(self, worker: WorkerId) -> int:
        return len(self._sent.get(worker, ()))

    def send(self, worker: WorkerId, hashes: Sequence[BlockHash]) -> None:
        sent = self._sent.setdefault(worker, OrderedDict())
        for block_hash in reversed(hashes):  # leaves are forgotten before what they grew from
            sent[block_hash] = None
            sent.move_to_end(block_hash)
        while self._most_blocks is not None and len(sent) > self._most_blocks:
            sent.popitem(last=False)


class SglangCacheAware:
    """SGLang's router, `cache_aware` (sgl-model-gateway/src/policies/cache_aware.rs). It goes by its own history of
    texts. The longest match counts if it covers more than half. Requests are balanced when they are far apart."""

    CACHE_THRESHOLD = 0.5
    BALANCE_ABSOLUTE = 32
    BALANCE_RELATIVE = 1.1
    HISTORY_TOKENS = 1 << 22
    """The tree is cut back to 2^24 characters per worker."""

    def __init__(self) -> None:
        self._history: History | None = None

    def __call__(self, snapshot: Snapshot) -> Decision:
        decode = lightest_decode(snapshot)
        if not snapshot.prefill:
            return decide(snapshot, decode, None)
        if self._history is None:
            self._history = History(self.HISTORY_TOKENS // snapshot.block_size)
        source = self._source(snapshot, self._history)
        self._history.send(source.worker, snapshot.block_hashes)
        return decide(snapshot, decode, source)

    def _source(self, snapshot: Snapshot, history: History) -> WorkerView:
        loads = [view.requests for view in snapshot.prefill]
        lightest = least(snapshot.prefill, lambda view: (view.requests,), snapshot.turn)
        is_uneven = max(loads) - min(loads) > self.BALANCE_ABSOLUTE and max(loads) > self.BALANCE_RELATIVE * min(loads)
        if is_uneven:
            return lightest
        matched, best = _longest([history.matched(v.worker, snapshot.block_hashes) for v in snapshot.prefill], snapshot)
        rate = matched * snapshot.block_size / max(1, snapshot.known_tokens)
        return best if rate > self.CACHE_THRESHOLD else lightest


class RayPrefixAffinity:
    """Ray Serve LLM's PrefixCacheAffinityRouter (prefix_aware_router.py). It goes by its own history, which forgets
    nothing. A match of a tenth is enough. Load is looked at only beyond a threshold that is infinite by default."""

    MATCH_RATE = 0.1

    def __init__(self, imbalance: float = float("inf")) -> None:
        self._imbalance = imbalance
        self._history = History()

    def __call__(self, snapshot: Snapshot) -> Decision:
        decode = lightest_decode(snapshot)
        if not snapshot.prefill:
            return decide(snapshot, decode, None)
        source = self._source(snapshot)
        self._history.send(source.worker, snapshot.block_hashes)
        return decide(snapshot, decode, source)

    def _source(self, snapshot: Snapshot) -> WorkerView:
        loads = [view.requests for view in snapshot.prefill]
        if max(loads) - min(loads) > self._imbalance:
            return least(snapshot.prefill, lambda view: (view.requests,), snapshot.turn)
        matched, best = _longest(
            [self._history.matched(v.worker, snapshot.block_hashes) for v in snapshot.prefill], snapshot
        )
        if matched * snapshot.block_size >= self.MATCH_RATE * snapshot.known_tokens:
            return best
        return least(snapshot.prefill, lambda view: (self._history.size(view.worker),), snapshot.turn)


class LlmdTokenAware:
    """llm-d's default, sticky until saturated (llm-d-router @ebab687). Workers that hold four fifths are preferred
    while they are not `sticky_s` of work busier than the others. Then the fewest tokens to compute decide, this
    prompt's included.
    """

    STICKY_MATCH = 0.8

    def __init__(self, sticky_s: float = 18.0) -> None:
        self._sticky_s = sticky_s

    def __call__(self, snapshot: Snapshot) -> Decision:
        decode = lightest_decode(snapshot)
        if not snapshot.prefill:
            return decide(snapshot, decode, None)
        warm = tuple(view for view in snapshot.prefill if self._match(snapshot, view) >= self.STICKY_MATCH)
        candidates = warm if warm and not self._is_saturated(snapshot, warm) else snapshot.prefill

        def tokens(view: WorkerView) -> tuple[float, ...]:
            return (view.queued_tokens + snapshot.known_tokens * (1 - self._match(snapshot, view)),)

        return decide(snapshot, decode, least(candidates, tokens, snapshot.turn))

    def _is_saturated(self, snapshot: Snapshot, warm: Sequence[WorkerView]) -> bool:
        """Compares the gap with a bearable wait; llm-d gives it in tokens, at the fleet's peak rate."""
        gap_tokens = min(view.queued_tokens for view in warm) - min(view.queued_tokens for view in snapshot.prefill)
        token_s = max(view.cost.prompt_token_s for view in snapshot.prefill) or UNKNOWN_COST.prompt_token_s
        return gap_tokens * token_s > self._sticky_s

    def _match(self, snapshot: Snapshot, view: WorkerView) -> float:
        return view.cached_blocks / snapshot.full_blocks if snapshot.full_blocks else 0.0


def _longest(matches: Sequence[int], snapshot: Snapshot) -> tuple[int, WorkerView]:
    """Returns the longest match and its worker; of several the one with fewest requests."""
    longest = max(matches)
    best = tuple(view for view, matched in zip(snapshot.prefill, matches, strict=True) if matched == longest)
    return longest, least(best, lambda view: (view.requests,), snapshot.turn)
