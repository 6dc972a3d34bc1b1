"""Exact keys and values of blocks that are not full yet, for forms with scales that span a block.

Such a form stores a block when its last token is there. Until then its tokens lie here, in the dtype of the model. A
row attends to its own block exactly, and to the blocks before it as the pool stores them. So neither the borders of
chunks nor a page that came from another worker changes a bit of what it computes.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from twostroke.kernels.attention.interface import RaggedBatch
from twostroke.kernels.pools.page_pool import PagePool
from twostroke.kv_cache.form import FORMS
from twostroke.page_forms.page_form import PageShape

MAP_NORESERVE: Final = 0x4000
"""The flag of Linux that reserves no memory for pages that are never touched."""


Ints = npt.NDArray[np.int32] | npt.NDArray[np.int64]


class ExactPlaces(Protocol):
    """Assigns the slots in which the exact tokens of a step are kept, outside their pages."""

    def begin(self, rows: Ints, block_tables: Ints, positions: Ints, released: Iterable[int]) -> npt.NDArray[np.int64]:
        """Returns the slot of each token, [T]; an empty array, [0], in forms that store each token on its own."""


class NoExactSlots:
    """The `ExactPlaces` of forms that store each token on its own."""

    def begin(self, rows: Ints, block_tables: Ints, positions: Ints, released: Iterable[int]) -> npt.NDArray[np.int64]:
        return np.empty(0, np.int64)


class ExactSlots:
    """The slots of unfinished blocks, by page, on the host. Slots are reused last in, first out."""

    def __init__(self, count: int, block: int, scratch_page: int | None = None) -> None:
        """There are `count` slots. The scratch page, if it is given, has one slot more for all that goes to it."""
        self._block = block
        self._free = list(reversed(range(count)))
        self._slots: dict[int, int] = {}
        self._scratch = {} if scratch_page is None else {scratch_page: count}

    def __len__(self) -> int:
        """Returns the number of blocks that have a slot."""
        return len(self._slots)

    def begin(self, rows: Ints, block_tables: Ints, positions: Ints, released: Iterable[int]) -> npt.NDArray[np.int64]:
        """Returns the slot * block + offset of each token of a step, [T]. First it frees the slots of released pages.

        `rows` [T] are the tokens' rows of the block tables.
        """
        self.release(released)
        pages = block_tables[rows, positions // self._block].tolist()
        return np.array([self._slot(page) for page in pages], np.int64) * self._block + positions % self._block

    def release(self, pages: Iterable[int]) -> None:
        """Frees the slots of blocks that are stored, or given up."""
        for page in pages:
            slot = self._slots.pop(page, None)
            if slot is not None:
                self._free.append(slot)

    def _slot(self, page: int) -> int:
        found = self._slots.get(page, self._scratch.get(page))
        if found is None:
            assert self._free, "more blocks are unfinished than there are slots"
            found = self._slots[page] = self._free.pop()
        return found


class ExactPages:
    """Pages for unfinished blocks, in the dtype of the model."""

    def __init__(self, pool: PagePool, slots: ExactSlots) -> None:
        self.pool = pool
        self.slots = slots

    @classmethod
    def sparse(cls, pages: int, shape: PageShape, dtype: torch.dtype) -> ExactPages:
        """Makes exact pages in host memory, with room for as many blocks as the pool holds. Only those in use take
        memory.
        """
        form = FORMS[str(dtype).removeprefix("torch.")]
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        memory = mmap.mmap(-1, pages * form.page_bytes(shape), flags=flags)
        data = torch.frombuffer(memory, dtype=torch.uint8).view(pages, -1)
        return cls(PagePool.over(data, form, shape), ExactSlots(pages, shape.block))

    @classmethod
    def fixed(
        cls, count: int, scratch_page: int, shape: PageShape, dtype: torch.dtype, device: torch.device
    ) -> ExactPages:
        """Makes exact pages on a device: `count` pages and a scratch page. A device takes all memory at once."""
        form = str(dtype).removeprefix("torch.")
        return cls(PagePool.empty(count + 1, form, shape, device), ExactSlots(count, shape.block, scratch_page))

    def begin(self, batch: RaggedBatch) -> torch.Tensor:
        """Returns the slot * block + offset of each token of a step, int64 [T]. First it frees the slots of the batch's
        released pages."""
        rows = np.repeat(np.arange(batch.sequences), np.diff(batch.query_starts))
        tables, positions = batch.block_tables.numpy(), batch.positions.numpy()
        return torch.from_numpy(self.slots.begin(rows, tables, positions, batch.released))
