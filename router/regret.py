"""How often a block is asked for again after it was evicted: what forgetting one will cost. Pure.

Where caches are large, hardly anything that is evicted comes back, and a copy more costs nothing; where they are small,
every copy pushes out what the next request wants.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from twostroke.ids import BlockName

REMEMBERED = 200_000
"""Evicted names: hours of a busy worker."""
WINDOW = 50_000
"""Evictions after which older ones count half."""


class EvictionRegret:
    def __init__(self) -> None:
        self._gone: OrderedDict[BlockName, None] = OrderedDict()
        """Evicted somewhere, the longest ago first."""
        self._evicted = 0.0
        self._asked_again = 0.0

    @property
    def share(self) -> float:
        """Of evicted blocks, those that were asked for when nobody had them any more."""
        return min(1.0, self._asked_again / self._evicted) if self._evicted else 0.0

    def evicted(self, names: Iterable[BlockName]) -> None:
        for name in names:
            self._gone[name] = None
            self._gone.move_to_end(name)
            self._evicted += 1
        while len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)
        if self._evicted > WINDOW:
            self._evicted /= 2
            self._asked_again /= 2

    def asked(self, lacking: Sequence[BlockName]) -> None:
        """Blocks that a request needs and nobody holds."""
        if not self._gone:
            return
        for name in lacking:
            if name in self._gone:
                del self._gone[name]
                self._asked_again += 1
