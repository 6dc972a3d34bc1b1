"""Which grammars decode workers have compiled, as far as this router has sent them there."""

from __future__ import annotations

from collections import OrderedDict

from router.fleet.worker import Worker
from twostroke.base.ids import Epoch, WorkerId
from twostroke.grammar.compiler import KEPT_GRAMMARS
from twostroke.request import Grammar

MOST_WORKERS = 1024
"""Workers with remembered grammars: those that got one last."""


class WorkerGrammars:
    """Each worker keeps those that it used last; so does this."""

    def __init__(self) -> None:
        self._by_worker: OrderedDict[tuple[WorkerId, Epoch], OrderedDict[int, None]] = OrderedDict()
        """Hashes of sources, the least recently used one first."""

    def compile_s(self, worker: Worker, grammar: Grammar, compile_s: float) -> float:
        """Returns the predicted seconds until the worker has compiled a request's grammar: here it took `compile_s`."""
        if hash(grammar.source) in self._by_worker.get((worker.worker_id, worker.epoch), ()):
            return 0.0
        return compile_s

    def placed(self, worker: Worker, grammar: Grammar) -> None:
        """Notes that a request with this grammar goes to the worker."""
        name = worker.worker_id, worker.epoch
        kept = self._by_worker.setdefault(name, OrderedDict())
        self._by_worker.move_to_end(name)
        if len(self._by_worker) > MOST_WORKERS:
            self._by_worker.popitem(last=False)
        kept[hash(grammar.source)] = None
        kept.move_to_end(hash(grammar.source))
        if len(kept) > KEPT_GRAMMARS:
            kept.popitem(last=False)
