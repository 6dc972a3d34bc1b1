"""Exact keys and values of blocks that are not full yet, for forms whose scales span a block.

Such a form stores a block when its last token is there. Until then its tokens lie here, in the dtype of the model. A
row attends to its own block exact, and to the blocks before it as the pool stores them: so neither the borders of
chunks nor a page that came from elsewhere changes a bit of what it computes.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from typing import Final

import torch

from twostroke.kernels.attention import RaggedBatch
from twostroke.kernels.page_pool import PagePool
from twostroke.kv_cache.form import FORMS, PageShape

MAP_NORESERVE: Final = 0x4000
"""The flag of Linux with which no memory is set aside for pages that are never touched."""


class ExactPages:
    """A slot for each unfinished block. Slots are reused last in, first out, so few of them take memory."""

    def __init__(self, pages: int, shape: PageShape, dtype: torch.dtype) -> None:
        """There is room for `pages` blocks, as many as the pool holds; memory is taken for those in use."""
        form = FORMS[str(dtype).removeprefix("torch.")]
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        memory = mmap.mmap(-1, pages * form.page_bytes(shape), flags=flags)
        data = torch.frombuffer(memory, dtype=torch.uint8).view(pages, -1)
        self.pool = PagePool.over(data, form, shape)
        self._free = list(reversed(range(pages)))
        self._slots: dict[int, int] = {}

    def __len__(self) -> int:
        """Return the number of blocks that have a slot."""
        return len(self._slots)

    def begin(self, batch: RaggedBatch) -> torch.Tensor:
        """Return the slot * block + offset of each token of a step, int64 [T]. Free what the step before left."""
        self.release(batch.released)
        block = self.pool.block
        counts = torch.tensor(batch.query_starts).diff()
        rows = torch.repeat_interleave(torch.arange(batch.sequences), counts)
        pages = batch.block_tables[rows, batch.positions.long() // block].tolist()
        slots = torch.tensor([self._slot(page) for page in pages], dtype=torch.int64)
        return slots * block + batch.positions % block

    def release(self, pages: Iterable[int]) -> None:
        """Free the slots of blocks that are stored, or given up."""
        for page in pages:
            slot = self._slots.pop(page, None)
            if slot is not None:
                self._free.append(slot)

    def _slot(self, page: int) -> int:
        found = self._slots.get(page)
        if found is None:
            found = self._slots[page] = self._free.pop()
        return found
