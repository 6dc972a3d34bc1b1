"""Learns from earlier requests for the next decisions. It reads no clock: time is passed in."""

from __future__ import annotations

import statistics
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from router.fleet.worker import Worker
from twostroke.base.ids import BlockHash, Epoch, WorkerId
from twostroke.grammar.compiler import KEPT_GRAMMARS
from twostroke.request import GenerateRequest

RESIDUAL_MEMORY = 63
"""Latest residuals that count: enough for a steady median, few enough to follow a change within a minute."""
LEAST_RESIDUALS = 8
"""Residuals below which none is predicted: the first requests of a fleet also wait for all that is done once."""
RESIDUAL_FRESH_S = 60.0
"""Seconds after which a residual does not count: a bad one keeps requests from the placements that would correct it."""


class PredictionResidual:
    """Learns the seconds that first tokens take beyond their forecast: rpcs, parsing, waking up.

    It is a median, so one odd request hardly changes it.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque(maxlen=RESIDUAL_MEMORY)
        """When each residual was observed, and its seconds. The oldest comes first."""
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
"""Most evicted hashes that are remembered: those of hours of a busy worker."""
HALVING_EVICTIONS = 50_000
"""Evictions after which all counts are halved."""


class ReReferenceRate:
    """Estimates how often an evicted block is requested again, which is the cost of evicting one.

    With large caches, evicted blocks are hardly requested again, and one more copy of a block costs nothing. With small
    caches, every copy evicts what the next request wants.
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
"""Most workers whose grammars are remembered. They are those that got a grammar last."""


class Setups:
    """Predicts the work before a worker can begin a request: it may load weights, or compile a grammar.

    Like each worker, it remembers the grammars that were used last, of the requests of this router.
    """

    def __init__(self) -> None:
        self._by_worker: OrderedDict[tuple[WorkerId, Epoch], OrderedDict[int, None]] = OrderedDict()
        """Hashes of grammar sources by worker, the least recently used first."""

    def seconds(self, worker: Worker, wanted: GenerateRequest, compile_s: float) -> tuple[float, float]:
        """Returns the worker's seconds to load the request's weights, and those to compile its grammar.

        `compile_s` is the time that compiling took here. Loading costs nothing while a worker has not measured it.
        """
        weights, grammar = wanted.weights, wanted.sampling.grammar
        is_loaded = weights is None or weights.digest in worker.load.weights
        kept = self._by_worker.get((worker.worker_id, worker.epoch), ())
        is_compiled = grammar is None or hash(grammar.source) in kept
        return 0.0 if is_loaded else worker.load.weights_load_s, 0.0 if is_compiled else compile_s

    def placed(self, worker: Worker, wanted: GenerateRequest) -> None:
        """Notes that the request goes to the worker, which then has its grammar."""
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
