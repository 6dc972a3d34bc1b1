"""Sums over all ranks and gathered results, in memory that the ranks share.

The memory is a memfd: it has no name, needs no room in /dev/shm, and is gone with its last process. How ranks meet in
it is described in `twostroke/kernels/cpu/native/ranks.h`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from twostroke.base.errors import RankLost
from twostroke.kernels.cpu.build import Kernels

if TYPE_CHECKING:
    import torch  # takes seconds, which a rank spends only once it sends heartbeats

FIRST: Final = 0
"""Index of the rank that receives requests and gathered results."""

LEAST_SLOT_BYTES: Final = 64 << 10
"""Least bytes of a rank's slot, so that gathered logits take few rounds also where a step's sums are short."""

MOST_SLOT_BYTES: Final = 8 << 20
"""Most bytes of a rank's slot: 512 rows of 4096 numbers. Larger slots make a sum no faster."""

_LINE: Final = 64
"""Bytes of a cache line, which slots begin at."""

_MET_ALL, _ABORTED = 0, 1
"""Values of `Met` in ranks.h. Its third one says that ranks are no longer in step."""

_ROUNDS: Final = 1 << 32
"""Round numbers wrap around at this count. No rank is more than one round ahead of another."""

_IS_BFLOAT16: Final = {"torch.float32": False, "torch.bfloat16": True}
"""Number types of sums, and whether each is bfloat16."""

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64


class RankGroup:
    """One rank's place among all ranks of a worker.

    All ranks make the same calls in the same order, each from one thread at a time. A call waits for the same call of
    the other ranks. It raises RankLost once any thread of any rank has called `abort`.
    """

    def __init__(
        self,
        kernels: Kernels,
        fd: int,
        rank: int,
        ranks: int,
        slot_bytes: int,
        why: Callable[[], str] = lambda: "a rank of this worker is lost",
    ) -> None:
        """Joins the group in the memory behind `fd`, which `create_memory` made. This object closes `fd`.

        `why` returns the reason why waits were ended, for the error.
        """
        assert 0 <= rank < ranks
        self._why = why
        self.rank, self.ranks, self.fd = rank, ranks, fd
        self.slot_bytes = slot_bytes
        new = kernels.function("twostroke_ranks_new", (_POINTER, ctypes.c_int32, ctypes.c_int32, _NUMBER), _POINTER)
        of_values = (_POINTER, _POINTER, _POINTER, _NUMBER, ctypes.c_int32)
        self._reduce = kernels.function("twostroke_ranks_reduce", of_values, ctypes.c_int32)
        of_rows = (_POINTER, _POINTER, _NUMBER, _NUMBER, _NUMBER, _POINTER)
        self._gather = kernels.function("twostroke_ranks_gather", of_rows, ctypes.c_int32)
        self._meet = kernels.function("twostroke_ranks_meet", (_POINTER,), ctypes.c_int32)
        self._abort = kernels.function("twostroke_ranks_abort", (_POINTER,))
        self._beat = kernels.function("twostroke_ranks_beat", (_POINTER,))
        self._beats = kernels.function("twostroke_ranks_beats", (_POINTER, ctypes.c_int32), ctypes.c_uint64)
        self._arrived = kernels.function("twostroke_ranks_arrived", (_POINTER, ctypes.c_int32), ctypes.c_uint32)
        self._free = kernels.function("twostroke_ranks_free", (_POINTER,))
        self._memory = mmap.mmap(fd, os.fstat(fd).st_size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.address: int | None = new(begin, rank, ranks, slot_bytes)
        """What a native kernel takes as its group; None once it is closed."""

    def all_reduce(self, values: torch.Tensor, team: int | None = None) -> None:
        """Overwrites `values` with their sum over all ranks: contiguous float32 or bfloat16 of the same shape on each.

        The ranks' numbers are added in the order of the ranks, in float32, and rounded once. `team` is the address of
        the threads that help.
        """
        assert values.is_contiguous()
        is_bfloat16 = _IS_BFLOAT16[str(values.dtype)]
        self.check(self._reduce(self.address, team, values.data_ptr(), values.numel(), is_bfloat16))

    def gather(self, part: torch.Tensor, columns: int) -> torch.Tensor | None:
        """Returns all ranks' parts of a [rows, columns] tensor side by side, only on the first rank.

        A part is [rows, columns of this rank], and has the same number type on all ranks.
        """
        rows, own_columns = part.shape
        whole = part.new_empty(rows, columns) if self.rank == FIRST else None
        part = part.contiguous()
        size = part.element_size()
        into = None if whole is None else whole.data_ptr()
        widths = rows, own_columns * size, columns * size
        self.check(self._gather(self.address, part.data_ptr(), *widths, into))
        return whole

    def meet(self) -> None:
        """Waits until all ranks have called it."""
        self.check(self._meet(self.address))

    def abort(self) -> None:
        """Ends all waits of all ranks, now and from now on. Any thread may call it."""
        if self.address is not None:
            self._abort(self.address)

    def beat(self) -> None:
        """Shows the others that this process is not frozen."""
        if self.address is not None:
            self._beat(self.address)

    def beats(self, rank: int) -> int:
        """Returns how often `beat` was called on `rank`."""
        return int(self._beats(self.address, rank))

    def awaited_round(self, rank: int) -> int | None:
        """Returns the number of the round in which the first rank waits for `rank`; None where it does not."""
        arrived = int(self._arrived(self.address, rank))
        first = int(self._arrived(self.address, FIRST))
        return first if (first - arrived) % _ROUNDS == 1 else None

    def close(self) -> None:
        """Leaves the group's memory. No thread is in a call."""
        address, self.address = self.address, None
        if address is not None:
            self._free(address)
            os.close(self.fd)
            self._memory.close()

    def check(self, met: int) -> None:
        """Raises RankLost where a kernel returned `Met` ABORTED, and AssertionError where ranks are not in step."""
        if met == _MET_ALL:
            return
        if met == _ABORTED:
            raise RankLost(self._why())
        self.abort()
        raise AssertionError(f"rank {self.rank} of {self.ranks} came with other sizes than another rank")


def slot_bytes_for(most_bytes: int) -> int:
    """Returns the bytes of a slot for sums of at most this many bytes. Each rank has two slots."""
    return -(-min(max(most_bytes, LEAST_SLOT_BYTES), MOST_SLOT_BYTES) // _LINE) * _LINE


def create_memory(kernels: Kernels, ranks: int, most_bytes: int) -> tuple[int, int]:
    """Returns the descriptor of memory for a group of `ranks`, claimed at once, and the bytes of a slot in it.

    `most_bytes` are those of the longest sum. It takes one round if it fits the largest slot, and several if not.
    Raises OSError where there is not enough memory.
    """
    slot_bytes = slot_bytes_for(most_bytes)
    size = kernels.function("twostroke_ranks_bytes", (ctypes.c_int32, _NUMBER), _NUMBER)
    fd = os.memfd_create("twostroke-ranks", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, size(ranks, slot_bytes))
    except OSError:
        os.close(fd)
        raise
    return fd, slot_bytes
