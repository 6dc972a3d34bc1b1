"""The memory of packed weights: private, or a file that all workers of a host map."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable
from typing import BinaryIO, Final, Protocol

import numpy as np
import torch

from twostroke.kernels.cpu.weights.packing import LARGE_PAGE_BYTES, copied_bytes, padded

ARENA_BYTES: Final = 64 << 20


class Arena(Protocol):
    """Memory of large pages. With small ones, address translation costs a fifth to a half of the speed at which weights
    are read."""

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copies `tensor`'s elements end to end, after what was copied before, and returns the copy."""

    def place(self, shape: tuple[int, ...], make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Returns the tensor that `make` makes, uint8 of this shape. `make` is called only where the arena does not
        have it yet."""


class PrivateArena:
    """Memory of this process."""

    def __init__(self) -> None:
        self._free = memoryview(b"")

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        count = _bytes_of(tensor)
        if len(self._free) < count:
            region = mmap.mmap(-1, -(-count // ARENA_BYTES) * ARENA_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            region.madvise(mmap.MADV_HUGEPAGE)
            self._free = memoryview(region)
        place = torch.frombuffer(self._free[:count], dtype=tensor.dtype).view(tensor.shape)
        self._free = self._free[copied_bytes(count) :]
        return place.copy_(tensor)

    def place(self, shape: tuple[int, ...], make: Callable[[], torch.Tensor]) -> torch.Tensor:
        return self.copy(_checked(make(), shape))


class WritingArena:
    """Writes the content of a file that a `MappedArena` reads."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        whole = tensor.contiguous()
        content = whole.view(-1).view(torch.uint8).numpy()
        self._file.write(content.data)
        self._file.write(bytes(copied_bytes(len(content)) - len(content)))
        return whole

    def place(self, shape: tuple[int, ...], make: Callable[[], torch.Tensor]) -> torch.Tensor:
        return self.copy(_checked(make(), shape))

    def finish(self) -> None:
        """Fills up the last large page."""
        size = self._file.tell()
        self._file.write(bytes(padded(size, LARGE_PAGE_BYTES) - size))


class MappedArena:
    """Returns what a `WritingArena` has written, for the same tensors in the same order. It does not read their
    elements."""

    def __init__(self, region: mmap.mmap) -> None:
        """`region` may be read-only. It stays mapped for as long as a tensor lies in it."""
        self._bytes = (ctypes.c_char * len(region)).from_address(np.frombuffer(region, np.uint8).ctypes.data)
        self._bytes.region = region  # type: ignore[attr-defined]  # which keeps it mapped
        self._offset = 0

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._next(tensor.dtype, tensor.shape)

    def place(self, shape: tuple[int, ...], make: Callable[[], torch.Tensor]) -> torch.Tensor:
        return self._next(torch.uint8, shape)

    def _next(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        offset, count = self._offset, math.prod(shape)
        assert offset + count * dtype.itemsize <= len(self._bytes), "the file was written for these tensors"
        self._offset += copied_bytes(count * dtype.itemsize)
        return torch.frombuffer(self._bytes, dtype=dtype, count=count, offset=offset).view(shape)


def _checked(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    assert (tensor.dtype, tensor.shape) == (torch.uint8, shape), "what another worker will expect here"
    return tensor


def _bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
