"""Adapters of a worker of several ranks: the first one tells the others which to have, between steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from twostroke.engine.adapter_slots import AdapterSlots
from twostroke.models.adapters.peft import Adapter


@dataclass(frozen=True, slots=True)
class PutAdapter:
    """Tells a rank to have an adapter, whose share it takes itself."""

    adapter: Adapter

    def on(self, slots: AdapterSlots) -> None:
        """Raises what preparing it raises, which the first rank has done already."""
        slots.put(self.adapter.digest, slots.prepare(self.adapter))


@dataclass(frozen=True, slots=True)
class DropAdapter:
    """Tells a rank to forget an adapter."""

    digest: bytes

    def on(self, slots: AdapterSlots) -> None:
        slots.drop(self.digest)


class RankedAdapters:
    """The `AdapterSlots` of a worker of several ranks."""

    def __init__(self, own: AdapterSlots, tell: Callable[[PutAdapter | DropAdapter], None]) -> None:
        """`own`: those of the first rank. `tell` lets the others do what a message says."""
        self._own = own
        self._tell = tell

    def prepare(self, adapter: Adapter) -> Any:
        """Raises what the first rank's slots raise."""
        return adapter, self._own.prepare(adapter)

    def put(self, digest: bytes, prepared: Any) -> None:
        """Raises RankLost."""
        adapter, own = prepared
        self._tell(PutAdapter(adapter))
        self._own.put(digest, own)

    def drop(self, digest: bytes) -> None:
        """Raises RankLost."""
        self._tell(DropAdapter(digest))
        self._own.drop(digest)
