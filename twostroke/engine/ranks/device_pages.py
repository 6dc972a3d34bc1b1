"""Pages with ranges of heads on the devices of a worker's ranks: whole to everybody but the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from twostroke.device.memory import DeviceMemory
from twostroke.device.staging import PoolPart, StagedAccess
from twostroke.device.stream import copy_stream
from twostroke.kv_cache.layout import PoolLayout, generation_bytes
from twostroke.kv_cache.memory import PageAccess, Pages, PoolLocation


class RankedDeviceMemory(Pages):
    """A page is its ranges side by side, as `JointForm` says. Ranks that have the same range each hold it."""

    def __init__(self, layout: PoolLayout, ranges: int, own: DeviceMemory, others: Sequence[torch.Tensor]) -> None:
        """`layout`: of whole pages. `own` has the first rank's part of each page, and is closed with this.

        `others` are those of the other ranks, in order: uint8 [bytes], as `own.layout` says.
        """
        assert layout.page_sizes == tuple(ranges * size for size in own.layout.page_sizes)
        self.layout = layout
        self._own = own
        self._memories = (own.tensor, *others)
        self._ranges = ranges
        self.generations = own.generations

    def access(self, batch_pages: int) -> PageAccess:
        ranks = len(self._memories)
        parts = [
            PoolPart(memory, self._own.layout, copy_stream(memory.device), rank * self._ranges // ranks)
            for rank, memory in enumerate(self._memories)
        ]
        return StagedAccess(parts, self.layout, batch_pages)

    @property
    def place(self) -> PoolLocation | None:
        return None

    @property
    def held_bytes(self) -> int:
        size_bytes = self._own.layout.size_bytes
        return size_bytes * len(self._memories) + generation_bytes(self.pages)

    def close(self) -> None:
        """Frees what is ours; what the other ranks have is freed as they end."""
        del self._memories, self.generations
        self._own.close()
