"""Page memory on a device: one tensor of bytes, and the generations beside it in host memory.

A page may be given to a new writer only when no kernel that was launched before still reads it. The reason is that
copies to and from the device run on streams of their own, which do not wait for kernels.
"""

from __future__ import annotations

import torch

from twostroke.device.staging import PoolPart, StagedAccess
from twostroke.device.stream import copy_stream
from twostroke.kv_cache.layout import PageRegion, PoolLayout, generation_bytes
from twostroke.kv_cache.memory import PageAccess, Pages, PoolLocation, available_memory_bytes
from twostroke.kv_cache.pool_size import refuse_more_than_free
from twostroke.kv_cache.shared import GenerationTable


class DeviceMemory(Pages):
    """`tensor` is uint8 [bytes] on `device`, zeros at first: the regions of `layout`.

    Raises ConfigError where the device cannot hold it, naming the bytes that are missing.
    """

    def __init__(self, pages: int, page_bytes: int, device: torch.device, *further: PageRegion) -> None:
        """`further` are the pages of the groups after the first."""
        self.layout = layout = PoolLayout.of(pages, page_bytes, *further)
        self.device = device
        refuse_more_than_free(layout.size_bytes, free_bytes(device), place=str(device))
        self.tensor = torch.zeros(layout.size_bytes, dtype=torch.uint8, device=device)
        self.table = GenerationTable(layout.pages)
        self.generations = self.table.generations

    @property
    def regions(self) -> tuple[torch.Tensor, ...]:
        """The pages of each group, uint8 [pages + scratch, page bytes]."""
        return tuple(
            self.tensor[start : start + region.size_bytes].view(-1, region.page_bytes)
            for start, region in zip(self.layout.starts, self.layout.regions, strict=True)
        )

    def access(self, batch_pages: int) -> PageAccess:
        return StagedAccess([PoolPart(self.tensor, self.layout, copy_stream(self.device))], self.layout, batch_pages)

    @property
    def place(self) -> PoolLocation:
        return PoolLocation(self.tensor.data_ptr(), self.tensor.get_device() if self.tensor.is_cuda else None)

    @property
    def held_bytes(self) -> int:
        return self.tensor.nbytes + generation_bytes(self.pages)

    def close(self) -> None:
        """Drops the tensor and the generations. Views that others hold keep the memory allocated until they are
        dropped."""
        del self.tensor
        self._drop_generations()
        self.table.close()


def free_bytes(device: torch.device) -> int:
    """Returns the bytes that this process may still allocate on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_memory_bytes()
