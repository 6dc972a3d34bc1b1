"""Brings a step's host arrays to the device: packed into one page-locked buffer, by one asynchronous copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

ALIGNMENT = 16
"""Alignment of every array's first byte: kernels are compiled anew for pointers that are aligned differently."""

HostArray = npt.NDArray[np.int32] | npt.NDArray[np.int64]

_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


def packed_offsets(arrays: Sequence[HostArray]) -> list[int]:
    """Returns the offset of each array's start, and of the last one's end."""
    offsets = [0]
    for array in arrays:
        offsets.append(-(-(offsets[-1] + array.nbytes) // ALIGNMENT) * ALIGNMENT)
    return offsets


class Staging:
    """One buffer on the host and its twin on the device, of `size_bytes`.

    The tensors of an upload are views of the twin, in the same places for arrays of the same shapes. The next upload
    overwrites them and the page-locked buffer, so the step must have ended before it.
    """

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self._host = torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._bytes: npt.NDArray[np.uint8] = self._host.numpy()
        self._twin = torch.zeros(size_bytes, dtype=torch.uint8, device=device)

    @property
    def size_bytes(self) -> int:
        return len(self._bytes)

    def upload(self, arrays: Sequence[HostArray]) -> list[torch.Tensor]:
        """Returns the arrays on the device, in stream order."""
        offsets = packed_offsets(arrays)
        assert offsets[-1] <= self.size_bytes, f"a step of {offsets[-1]} bytes in a staging buffer of {self.size_bytes}"
        for array, start in zip(arrays, offsets, strict=False):
            target = self._bytes[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
            target[...] = array
        end = offsets[-1]
        self._twin[:end].copy_(self._host[:end], non_blocking=True)
        return [self._view(array, start) for array, start in zip(arrays, offsets, strict=False)]

    def _view(self, like: HostArray, start: int) -> torch.Tensor:
        flat = self._twin[start : start + like.nbytes].view(_DTYPES[like.dtype])
        return flat.view(like.shape)
