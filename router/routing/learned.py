"""What a router learns from requests for its next decisions. Pure: the clock is passed in."""

from __future__ import annotations

import statistics
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from router.fleet.worker import Worker
from twostroke.base.ids import BlockHash, Epoch, WorkerId
from twostroke.grammar.compiler import KEPT_GRAMMARS
from twostroke.request import GenerateRequest

RESIDUAL_MEMORY = 63
"""Residuals that count: enough for a steady median, few enough to follow a change within a minute of traffic."""
LEAST_RESIDUALS = 8
"""Fewer residuals say nothing: the first requests of a fleet meet everything for the first time."""
RESIDUAL_FRESH_S = 60.0
"""Older residuals do not count: while a bad minute refuses every request, no request would show a better one."""


class PredictionResidual:
    """Learns what first tokens take beyond their forecast: rpcs, parsing, waking up.

    It is a median: a request that met something odd moves it by one place.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque(maxlen=RESIDUAL_MEMORY)
        """When each was seen, and its seconds."""
        self._median_s = 0.0

    def seconds(self, now_s: float) -> float:
        if self._seen and self._seen[0][0] + RESIDUAL_FRESH_S < now_s:
            while self._seen and self._seen[0][0] + RESIDUAL_FRESH_S < now_s:
                self._seen.popleft()
            self._update()
        return self._median_s

    def observe(self, seconds: float, now_s: float) -> None:
        """Notes by how much a first token came later than forecast."""
        self._seen.append((now_s, seconds))
        self._update()

    def _update(self) -> None:
        enough = len(self._seen) >= LEAST_RESIDUALS
        self._median_s = max(0.0, statistics.median([seconds for _, seconds in self._seen])) if enough else 0.0


REMEMBERED_EVICTIONS = 200_000
"""Evicted hashes that are remembered: hours of a busy worker."""
HALVING_EVICTIONS = 50_000
"""Evictions after which older ones count half."""


class ReReferenceRate:
    """Counts how often a block is asked for again after it was evicted: what forgetting one will cost.

    Where caches are large, hardly anything evicted comes back, and one more copy costs nothing. Where they are small,
    every copy pushes out what the next request wants.
    """

    def __init__(self) -> None:
        self._evicted_blocks: OrderedDict[BlockHash, None] = OrderedDict()
        """Blocks that were evicted somewhere, the longest ago first."""
        self._evicted = 0.0
        self._asked_again = 0.0

    @property
    def rate(self) -> float:
        """Share of evicted blocks that were asked for when no worker had them any more."""
        return min(1.0, self._asked_again / self._evicted) if self._evicted else 0.0

    def evicted(self, hashes: Iterable[BlockHash]) -> None:
        for block_hash in hashes:
            self._evicted_blocks[block_hash] = None
            self._evicted_blocks.move_to_end(block_hash)
            self._evicted += 1
        while len(self._evicted_blocks) > REMEMBERED_EVICTIONS:
            self._evicted_blocks.popitem(last=False)
        if self._evicted > HALVING_EVICTIONS:
            self._evicted /= 2
            self._asked_again /= 2

    def asked(self, lacking: Sequence[BlockHash]) -> None:
        """Notes that a request needs these blocks and no worker holds them."""
        if not self._evicted_blocks:
            return
        for block_hash in lacking:
            if block_hash in self._evicted_blocks:
                del self._evicted_blocks[block_hash]
                self._asked_again += 1


MOST_WORKERS = 1024
"""Workers with remembered grammars: those that got one last."""


class Setups:
    """Predicts what a worker does before it can begin a request: it loads weights, or compiles a grammar.

    Each worker keeps the grammars that it used last; so does this, for those that this router has sent there.
    """

    def __init__(self) -> None:
        self._by_worker: OrderedDict[tuple[WorkerId, Epoch], OrderedDict[int, None]] = OrderedDict()
        """Hashes of sources, the least recently used one first."""

    def seconds(self, worker: Worker, wanted: GenerateRequest, compile_s: float) -> tuple[float, float]:
        """Returns the seconds until it computes, and until it admits the request, which took `compile_s` to compile
        here.

        A worker that has not measured any load costs nothing.
        """
        weights, grammar = wanted.weights, wanted.sampling.grammar
        is_loaded = weights is None or weights.digest in worker.load.weights
        kept = self._by_worker.get((worker.worker_id, worker.epoch), ())
        is_compiled = grammar is None or hash(grammar.source) in kept
        return 0.0 if is_loaded else worker.load.weights_load_s, 0.0 if is_compiled else compile_s

    def placed(self, worker: Worker, wanted: GenerateRequest) -> None:
        """Notes that the request goes to the worker."""
        grammar, name = wanted.sampling.grammar, (worker.worker_id, worker.epoch)
        if grammar is None:
            return
        kept = self._by_worker.setdefault(name, OrderedDict())
        self._by_worker.move_to_end(name)
        if len(self._by_worker) > MOST_WORKERS:
            self._by_worker.popitem(last=False)
        kept[hash(grammar.source)] = None
        kept.move_to_end(hash(grammar.source))
        if len(kept) > KEPT_GRAMMARS:
            kept.popitem(last=False)
