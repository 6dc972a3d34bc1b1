"""Adapters of a paced model: every running hash, and every token, depends on the adapter's digest."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from twostroke.engine.adapters.slots import AdapterSlots
from twostroke.engine.extras import NoExtra, Offers, OtherProcesses
from twostroke.models.adapters.peft import Adapter
from twostroke.scheduler.batch import Batch


class PacedAdapters(NoExtra):
    """The `AdapterSlots` of a paced model."""

    def __init__(self) -> None:
        self._seeds: dict[bytes | None, int] = {None: 0}

    def prepare(self, adapter: Adapter) -> int:
        return int.from_bytes(adapter.digest[:8], "little") | 1

    def put(self, digest: bytes, prepared: int) -> None:
        self._seeds[digest] = prepared

    def drop(self, digest: bytes) -> None:
        del self._seeds[digest]

    def of_step(self, batch: Batch) -> npt.NDArray[np.uint64] | None:
        return self.seeds(batch.weights) if batch.weights else None

    def seeds(self, adapters: Sequence[bytes | None]) -> npt.NDArray[np.uint64]:
        """Returns a seed for each adapter, 0 for None. Raises KeyError for an adapter that is not loaded."""
        return np.array([self._seeds[adapter] for adapter in adapters], np.uint64)

    def offers(self, others: OtherProcesses | None) -> Offers:
        return {AdapterSlots: self}
