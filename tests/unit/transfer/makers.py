"""Every kind of page transport, and the memory that its pages are in, as conformance tests take them."""

from __future__ import annotations

import importlib.util
import mmap
import os

import msgpack
import numpy as np
import torch

from twostroke.device.memory import DeviceMemory
from twostroke.kv_cache.memory import PageMemory, Pages
from twostroke.transfer.base import PageTransport
from twostroke.transfer.cuda_ipc import CudaIpcTransport, Sharing
from twostroke.transfer.fake import FakeTransport
from twostroke.transfer.shm import ShmTransport
from twostroke.transfer.tcp import TcpTransport

HAS_NIXL = importlib.util.find_spec("nixl_cu12") is not None
KINDS = ["shm", "tcp", "fake", "tcp-staged", "cuda_ipc", *(["nixl"] if HAS_NIXL else [])]
ONE_SIDED = {"shm", "cuda_ipc"}
"""Kinds for which nothing of the owner runs during a pull."""
STAGED = {"tcp-staged", "cuda_ipc"}


class HostSharing(Sharing):
    """Stands in for CUDA's: the tensor lies in shared memory, which another process opens through /proc."""

    def device_name(self, device: torch.device) -> str:
        return f"{device}-0"

    def reachable(self, name: str, ours: torch.device) -> torch.device | None:
        return ours if name == self.device_name(ours) else None

    def share(self, pool: torch.Tensor) -> bytes:
        descriptor, size = pool.untyped_storage()._share_fd_cpu_()
        return bytes(msgpack.packb([os.getpid(), descriptor, size]))

    def open(self, handle: bytes, device: torch.device) -> torch.Tensor:
        pid, descriptor, size = msgpack.unpackb(handle)
        with open(f"/proc/{pid}/fd/{descriptor}", "r+b", buffering=0) as file:
            return torch.from_numpy(np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8))


def group_of(kind: str) -> str:
    """Owners of one group serve all its kinds at once."""
    if kind == "nixl":
        return "nixl"
    return "staged" if kind in STAGED else "host"


GROUPS = {"host": ["shm", "tcp"], "staged": ["tcp-staged", "cuda_ipc"], "nixl": ["nixl"]}


def make_memory(group: str, pages: int, page_bytes: int) -> Pages:
    if group != "staged":
        return PageMemory(pages, page_bytes)
    memory = DeviceMemory(pages, page_bytes, torch.device("cpu"))
    memory.tensor.share_memory_()
    return memory


def bytes_of(memory: Pages) -> np.ndarray:
    """All pages, as a view."""
    if isinstance(memory, PageMemory):
        return memory.data
    assert isinstance(memory, DeviceMemory)
    return memory.tensor.numpy()


def make_transport(kind: str) -> PageTransport:
    match kind:
        case "shm":
            return ShmTransport()
        case "cuda_ipc":
            return CudaIpcTransport(HostSharing())
        case "nixl":
            os.environ["UCX_TLS"] = "tcp"
            from twostroke.transfer.nixl import NixlTransport

            return NixlTransport("127.0.0.1")
        case "fake":
            return FakeTransport(TcpTransport("127.0.0.1"))
    return TcpTransport("127.0.0.1")
