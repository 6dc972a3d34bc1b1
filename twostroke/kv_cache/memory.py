"""The bytes behind a pool's pages, and a generation per page.

The memory is one memfd: it has no name, so nothing is left behind when its owner dies, and another process on the
same host can map it once it was handed the descriptor. Layout: `generations` (one u64 per page), padding to the
system's page size, then the pages, each `page_bytes` long. A page's generation counts how often it was given to a new
writer: a reader that sees the same generation before and after its copy has read one page, not two. Once mapped, the
memfd is sealed: whoever gets the descriptor can read the pages, but neither write nor resize them.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from twostroke.errors import ConfigError
from twostroke.ids import PageId

SCRATCH_PAGES = 1
"""One page past the last is never handed out: writes that nobody wants go there."""
_SEAL_FUTURE_WRITE = 0x0010
"""F_SEAL_FUTURE_WRITE of Linux 5.1: mappings made before stay writable. Python's fcntl does not name it yet."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL


class PageMemory:
    """`pages` pages of `page_bytes` bytes, plus one scratch page, pre-faulted and shareable.

    Raises ConfigError where the machine's memory cannot hold it.
    """

    def __init__(self, pages: int, page_bytes: int, *, fd: int | None = None) -> None:
        self.pages = pages
        self.page_bytes = page_bytes
        self._header_bytes = _header_bytes(pages)
        self.total_bytes = self._header_bytes + (pages + SCRATCH_PAGES) * page_bytes
        owner = fd is None
        if owner:
            _refuse_what_cannot_fit(self.total_bytes)
            self.fd = os.memfd_create("twostroke-pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, self.total_bytes)
        else:
            assert fd is not None
            self.fd = fd
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if owner else 0)
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if owner else 0)
        self._map = mmap.mmap(self.fd, self.total_bytes, flags=flags, prot=prot)
        if owner:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        self.generations: npt.NDArray[np.uint64] = np.frombuffer(self._map, np.uint64, count=pages)
        self.data: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8, offset=self._header_bytes).reshape(
            pages + SCRATCH_PAGES, page_bytes
        )

    @classmethod
    def attach(cls, fd: int, pages: int, page_bytes: int) -> PageMemory:
        """Map another process's memory, read-only, from a descriptor it handed over, and take the descriptor over.

        Raises ConfigError where it is not such a memory; the descriptor then stays the caller's.
        """
        expected = _header_bytes(pages) + (pages + SCRATCH_PAGES) * page_bytes
        actual = os.fstat(fd).st_size
        if actual != expected:
            raise ConfigError(f"shared page memory is {actual} bytes, expected {expected}")
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ConfigError("shared page memory is not sealed: its owner could shrink it under a reader")
        return cls(pages, page_bytes, fd=fd)

    @property
    def scratch(self) -> PageId:
        return PageId(self.pages)

    def page(self, page: PageId) -> npt.NDArray[np.uint8]:
        """The bytes of one page, as a view."""
        view: npt.NDArray[np.uint8] = self.data[page]
        return view

    def generation(self, page: PageId) -> int:
        return int(self.generations[page])

    def begin_new_generation(self, page: PageId) -> None:
        """Call before a page is given to a new writer."""
        self.generations[page] += np.uint64(1)

    def close(self) -> None:
        """Drop the mapping. Views that others still hold keep it alive until they go."""
        del self.generations, self.data  # first, so that a second close cannot reach a descriptor of somebody else's
        os.close(self.fd)
        try:
            self._map.close()
        except BufferError:
            del self._map


def _header_bytes(pages: int) -> int:
    return -(-pages * 8 // mmap.PAGESIZE) * mmap.PAGESIZE


def _refuse_what_cannot_fit(total_bytes: int) -> None:
    available = available_memory_bytes()
    if total_bytes > available:
        raise ConfigError(
            f"--kv-cache-memory asks for {total_bytes} bytes of pages, but only {available} are available",
            field="kv_cache_memory",
        )


def available_memory_bytes() -> int:
    """What this process may still allocate: the machine's free memory or the cgroup's limit, whichever is less."""
    meminfo = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    facts = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in meminfo}
    return min(facts["MemAvailable"], cgroup_headroom_bytes(Path("/sys/fs/cgroup"), otherwise=facts["MemAvailable"]))


def cgroup_headroom_bytes(cgroup: Path, *, otherwise: int) -> int:
    """What a cgroup (v2) may still allocate. Cold file cache counts as free: the kernel drops it first."""
    limit = cgroup / "memory.max"
    if not limit.exists() or limit.read_text(encoding="ascii").strip() == "max":
        return otherwise
    used = int((cgroup / "memory.current").read_text(encoding="ascii"))
    statistics = dict(line.split() for line in (cgroup / "memory.stat").read_text(encoding="ascii").splitlines())
    return int(limit.read_text(encoding="ascii")) - used + int(statistics["inactive_file"])
