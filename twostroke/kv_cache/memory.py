"""Page memory: the bytes behind a pool's pages on host or device, and a generation per page.

A page's generation counts its writers: a reader that sees the same generation before and after its copy has read one
page, not two. `Pages` is the interface; `PageMemory` is in host memory, `twostroke.device.memory` on a device.
"""

from __future__ import annotations

import abc
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from twostroke.base.ids import PageId
from twostroke.kv_cache.layout import PageRegion, PoolLayout, generation_bytes
from twostroke.kv_cache.pool_size import refuse_more_than_free
from twostroke.kv_cache.shared import SharedMemory

_MOST_GENERATIONS = (1 << 64) - 1

STAT_BLOCK_BYTES = 512
"""The unit in which the system counts the blocks of a file."""


class PageAccess(abc.ABC):
    """Access from the host to the bytes of pages, for one thread."""

    @abc.abstractmethod
    def read(self, batches: Iterable[Sequence[int]]) -> Iterator[list[memoryview]]:
        """Yields the bytes of the pages, batch by batch; views are valid until the next batch is asked for."""

    @abc.abstractmethod
    def landing(self, pages: Sequence[int]) -> list[memoryview]:
        """Returns buffers for the bytes of these pages; call `landed` once they are filled."""

    @abc.abstractmethod
    def landed(self) -> None:
        """Starts moving the bytes of the last landing into their pages."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Waits until all landed bytes are in their pages."""

    @abc.abstractmethod
    def close(self) -> None:
        """Releases the memory."""


@dataclass(frozen=True, slots=True)
class PoolLocation:
    """Memory location of the first page of the first region."""

    address: int
    gpu: int | None
    """Index of the GPU in this process; None for host memory."""


class Pages(abc.ABC):
    """The pages of a pool: those of each page group, plus one scratch page after them."""

    layout: PoolLayout
    generations: npt.NDArray[np.uint64]
    """Generations of all pages, always in host memory."""
    _counts: memoryview | None = None
    """Another view of `generations`, which Python increments faster than numpy's scalars."""

    @abc.abstractmethod
    def access(self, batch_pages: int) -> PageAccess:
        """Returns an access to at most `batch_pages` pages at a time."""

    @property
    @abc.abstractmethod
    def place(self) -> PoolLocation | None:
        """Location of the pages; None if they are split over several devices."""

    @property
    @abc.abstractmethod
    def held_bytes(self) -> int:
        """Bytes of memory that the system has allocated for the pages, as it reports them."""

    @abc.abstractmethod
    def close(self) -> None:
        """Frees the memory."""

    @property
    def pages(self) -> int:
        """Pages of all groups."""
        return self.layout.pages

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of the first group."""
        return self.layout.regions[0].page_bytes

    @property
    def scratch(self) -> PageId:
        """The row of the first group's scratch page."""
        return PageId(self.layout.regions[0].pages)

    def generation(self, page: PageId) -> int:
        return self.generations.item(page)

    def generations_of(self, pages: Sequence[PageId]) -> list[int]:
        return list(map(self._counted.__getitem__, pages))

    def begin_new_generation(self, page: PageId) -> None:
        """Begins a new generation of a page. Call it before the page gets a new writer."""
        self.begin_new_generations([page])

    def begin_new_generations(self, pages: Sequence[PageId]) -> None:
        counts = self._counted
        for page in pages:
            counts[page] = (counts[page] + 1) & _MOST_GENERATIONS

    def _drop_generations(self) -> None:
        self._counts = None
        del self.generations

    @property
    def _counted(self) -> memoryview:
        if self._counts is None:
            self._counts = self.generations.data
        return self._counts


class PageMemory(Pages):
    """Pages in one memfd, allocated at once, which other processes of the host can map.

    Layout: `generations` (one u64 per page), padding to the system's page size, then the regions of `PoolLayout`.
    Raises ConfigError if the machine's memory cannot hold it.
    """

    def __init__(
        self,
        pages: int,
        page_bytes: int,
        *further: PageRegion,
        fd: int | None = None,
        flag: str = "--kv-cache-memory",
        writers: bool = False,
    ) -> None:
        """`further`: the pages of other groups than the first. `flag`: the setting that asked for the memory.

        `writers`: other processes of the worker write to it, too. The owner calls `protect` once they have mapped it.
        """
        self.layout = layout = PoolLayout.of(pages, page_bytes, *further)
        self.total_bytes = layout.host_bytes
        if fd is None:
            refuse_more_than_free(self.total_bytes, available_memory_bytes(), flag=flag)
            self._memory = SharedMemory(self.total_bytes)
            if not writers:
                self.protect()
        elif writers:
            self._memory = SharedMemory(self.total_bytes, fd=fd)
        else:
            self._memory = SharedMemory.attach(fd, self.total_bytes)
        self.fd = self._memory.fd
        self.generations = np.frombuffer(self._memory.map, np.uint64, count=layout.pages)
        self._flat: npt.NDArray[np.uint8] = np.frombuffer(
            self._memory.map, np.uint8, offset=generation_bytes(layout.pages), count=layout.size_bytes
        )
        self.regions = tuple(
            self._flat[start : start + region.size_bytes].reshape(-1, region.page_bytes)
            for start, region in zip(layout.starts, layout.regions, strict=True)
        )
        """The pages of each group, uint8 [pages + scratch, page bytes]."""

    @classmethod
    def attach(cls, fd: int, layout: PoolLayout) -> PageMemory:
        """Maps another process's memory, read-only, from its descriptor, which this object closes.

        Raises ConfigError if it is not such a memory; the descriptor then stays the caller's.
        """
        first, *further = layout.regions
        return cls(first.pages, first.page_bytes, *further, fd=fd)

    @classmethod
    def join(cls, fd: int, layout: PoolLayout) -> PageMemory:
        """Maps the memory of the worker that this process belongs to, before it is sealed."""
        first, *further = layout.regions
        return cls(first.pages, first.page_bytes, *further, fd=fd, writers=True)

    def protect(self) -> None:
        """Denies writing to every process that has not mapped the pages yet. Only then may others get them."""
        self._memory.protect()

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """The pages of the first group, uint8 [pages + scratch, page bytes]."""
        return self.regions[0]

    def map_in(self) -> None:
        """Maps all pages into this process, so that the first use of a page causes no page fault."""
        for region in self.regions:
            for page in region:
                page[:: mmap.PAGESIZE].max()

    def access(self, batch_pages: int) -> PageAccess:
        return _HostAccess(self._flat, self.layout)

    @property
    def place(self) -> PoolLocation:
        return PoolLocation(self._flat.ctypes.data, None)

    @property
    def held_bytes(self) -> int:
        return os.fstat(self.fd).st_blocks * STAT_BLOCK_BYTES

    def page(self, page: PageId) -> npt.NDArray[np.uint8]:
        """Returns a view of one page."""
        layout = self.layout
        region = layout.region_of(page)
        view: npt.NDArray[np.uint8] = self.regions[region][page - layout.first(region)]
        return view

    def views(self, pages: Sequence[PageId]) -> list[memoryview]:
        """Returns the bytes of pages."""
        pool = self._flat.data
        if len(self.regions) > 1:
            return [pool[self.layout.span(page)] for page in pages]
        size = self.page_bytes
        return [pool[page * size : (page + 1) * size] for page in pages]

    def close(self) -> None:
        """Unmaps the memory. Views that are still in use keep it mapped until they are released."""
        self._drop_generations()
        # Views go first, so that a second close cannot close another owner's descriptor.
        del self.regions, self._flat
        self._memory.close()


class _HostAccess(PageAccess):
    """Access to pages in host memory: the pages themselves are its buffers."""

    def __init__(self, flat: npt.NDArray[np.uint8], layout: PoolLayout) -> None:
        self._span = layout.span
        self._pool = flat.data

    def read(self, batches: Iterable[Sequence[int]]) -> Iterator[list[memoryview]]:
        return map(self.landing, batches)

    def landing(self, pages: Sequence[int]) -> list[memoryview]:
        return [self._pool[self._span(page)] for page in pages]

    def landed(self) -> None:
        """Moves nothing: the buffers are the pages."""

    def synchronize(self) -> None:
        """Waits for nothing."""

    def close(self) -> None:
        self._pool.release()


def available_memory_bytes() -> int:
    """Returns the bytes that this process may still allocate, by the machine's memory and the cgroup's limit."""
    meminfo = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    facts = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in meminfo}
    return min(facts["MemAvailable"], cgroup_free_bytes(Path("/sys/fs/cgroup"), otherwise=facts["MemAvailable"]))


def cgroup_free_bytes(cgroup: Path, *, otherwise: int) -> int:
    """Returns the bytes that a cgroup (v2) may still allocate; cold file cache counts as free."""
    limit = cgroup / "memory.max"
    if not limit.exists() or limit.read_text(encoding="ascii").strip() == "max":
        return otherwise
    used = int((cgroup / "memory.current").read_text(encoding="ascii"))
    statistics = dict(line.split() for line in (cgroup / "memory.stat").read_text(encoding="ascii").splitlines())
    return int(limit.read_text(encoding="ascii")) - used + int(statistics["inactive_file"])
