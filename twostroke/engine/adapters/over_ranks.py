"""Adapters of a worker of several ranks: the first rank tells the others which adapters to prepare, use and drop.

Each rank prepares its share of an adapter while steps run. Between two steps all ranks begin to use it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from twostroke.base.errors import ConfigError
from twostroke.engine.adapters.slots import AdapterSlots
from twostroke.engine.extras import OtherProcesses
from twostroke.models.adapters.peft import Adapter


@dataclass(frozen=True, slots=True, eq=False)
class OtherRankAdapters:
    """The adapters of a rank other than the first."""

    slots: AdapterSlots
    prepared: dict[bytes, Any] = field(default_factory=dict)
    """Prepared adapters by digest that no step uses yet, in the order in which they came."""

    def take(self, digest: bytes) -> Any:
        """Removes and returns what was prepared of an adapter.

        The first rank begins to use adapters in the order in which they came. So those that came before this one were
        given up, and are removed, too.
        """
        for earlier in itertools.takewhile(lambda each: each != digest, list(self.prepared)):
            self.prepared.pop(earlier, None)
        return self.prepared.pop(digest)


@dataclass(frozen=True, slots=True)
class PrepareAdapter:
    """Tells a rank to prepare its share of an adapter."""

    adapter: Adapter

    def on(self, rank: OtherRankAdapters) -> None:
        """Prepares the adapter. Raises what the slots raise: this rank may have less memory than the first, or be
        unable to read a file."""
        prepared = rank.slots.prepare(self.adapter)
        rank.prepared.pop(self.adapter.digest, None)  # given up before; the new one goes to the end of the order
        rank.prepared[self.adapter.digest] = prepared


@dataclass(frozen=True, slots=True)
class GiveUpAdapter:
    """Tells a rank to forget an adapter that it has prepared, because another rank could not prepare its share."""

    digest: bytes

    def on(self, rank: OtherRankAdapters) -> None:
        rank.prepared.pop(self.digest, None)


@dataclass(frozen=True, slots=True)
class PutAdapter:
    """Tells a rank to use an adapter that it has prepared."""

    digest: bytes

    def on(self, rank: OtherRankAdapters) -> None:
        rank.slots.put(self.digest, rank.take(self.digest))


@dataclass(frozen=True, slots=True)
class DropAdapter:
    """Tells a rank to forget an adapter."""

    digest: bytes

    def on(self, rank: OtherRankAdapters) -> None:
        rank.slots.drop(self.digest)


class RankedAdapters:
    """The `AdapterSlots` of a worker of several ranks."""

    def __init__(self, own: AdapterSlots, others: OtherProcesses) -> None:
        """`own` are the slots of the first rank."""
        self._own = own
        self._others = others

    def prepare(self, adapter: Adapter) -> Any:
        """Prepares the adapter at all ranks, or at none if one of them cannot.

        Raises what the first rank's slots raise, ConfigError where another rank cannot prepare it, and RankLost.
        """
        prepared = self._own.prepare(adapter)
        try:
            self._others.aside(PrepareAdapter(adapter))
        except ConfigError:
            self._others.aside(GiveUpAdapter(adapter.digest))
            raise
        return prepared

    def put(self, digest: bytes, prepared: Any) -> None:
        """Raises RankLost."""
        self._others.tell(PutAdapter(digest))
        self._own.put(digest, prepared)

    def drop(self, digest: bytes) -> None:
        """Raises RankLost."""
        self._others.tell(DropAdapter(digest))
        self._own.drop(digest)
