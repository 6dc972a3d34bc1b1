"""How processes of one host share the memory of a device."""

from __future__ import annotations

import abc
import json

import torch


class MemorySharing(abc.ABC):
    @abc.abstractmethod
    def device_name(self, device: torch.device) -> str:
        """Returns a name of the device, without spaces, that is the same in every process."""

    @abc.abstractmethod
    def reachable(self, name: str, ours: torch.device) -> torch.device | None:
        """Returns this process's device of that name; None if `ours` cannot copy from it."""

    @abc.abstractmethod
    def share(self, pool: torch.Tensor) -> bytes:
        """Returns a handle with which another process opens the pool, of uint8. The process may open it once."""

    @abc.abstractmethod
    def open(self, handle: bytes, device: torch.device) -> torch.Tensor:
        """Returns the shared pool as flat bytes. The pool stays open as long as the returned tensor exists."""


class CudaSharing(MemorySharing):
    """CUDA IPC as torch does it: the allocator shares the segment that the pool lies in, and keeps count of readers.

    torch opens a segment once per process, and closes it with the last tensor over it.
    """

    def device_name(self, device: torch.device) -> str:
        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"

    def reachable(self, name: str, ours: torch.device) -> torch.device | None:
        for index in range(torch.cuda.device_count()):
            device = torch.device("cuda", index)
            if self.device_name(device) == name:
                near = device == ours or torch.cuda.can_device_access_peer(ours, device)
                return device if near else None
        return None

    def share(self, pool: torch.Tensor) -> bytes:
        _, *fields = pool.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]  # torch annotates it not
        plain = [field.hex() if isinstance(field, bytes) else field for field in fields]
        return json.dumps([*plain, pool.storage_offset()]).encode()

    def open(self, handle: bytes, device: torch.device) -> torch.Tensor:
        segment, size, place, readers, reader, event, must_wait, offset = json.loads(handle)
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch annotates it not
        segment, readers, event = (bytes.fromhex(name) for name in (segment, readers, event))
        # The owner may number the devices differently, so the storage is opened on our number.
        storage = torch.UntypedStorage._new_shared_cuda(
            device.index, segment, size, place, readers, reader, event, must_wait
        )
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)[offset:]
