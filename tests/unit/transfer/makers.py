"""Every kind of page transport, and the memory that its pages are in, as conformance tests take them."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import mmap
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

import msgpack
import numpy as np
import pytest
import torch

from tests.certificates import Authority
from tests.trials.chaos.injection.fake_transport import FakeTransport
from twostroke.base.credentials import TlsConfig
from twostroke.device.memory import DeviceMemory
from twostroke.device.sharing import MemorySharing
from twostroke.kv_cache.layout import PageRegion
from twostroke.kv_cache.memory import PageMemory, Pages
from twostroke.transfer.base import PageTransport
from twostroke.transfer.network.tcp import TcpTransport
from twostroke.transfer.same_host.cuda_ipc import CudaIpcTransport
from twostroke.transfer.same_host.shm import ShmTransport
from twostroke.transfer.sockets.tls import wrapper_for

HAS_NIXL = importlib.util.find_spec("nixl_cu12") is not None
GPU_KINDS = ["cuda_ipc-gpu", "tcp-gpu"]
HAS_GPU = torch.cuda.device_count() > 0
"""The driver's library counts the devices: `is_available` would start CUDA here, and processes forked from this one, in
which pages are owned, could not use it."""
KINDS = [
    *("shm", "tcp", "fake", "tcp-tls", "cuda_ipc"),
    pytest.param("tcp-staged", marks=pytest.mark.slow),
    *(["nixl"] if HAS_NIXL else []),
    *(pytest.param(kind, marks=pytest.mark.gpu) for kind in GPU_KINDS if HAS_GPU),
]
ONE_SIDED = {"shm", "cuda_ipc", "cuda_ipc-gpu"}
"""Kinds for which nothing of the owner runs during a pull."""
STAGED = {"tcp-staged", "cuda_ipc", *GPU_KINDS}


CERTIFICATES = "TWOSTROKE_TEST_CERTIFICATES"
"""The environment variable that names the certificates of both ends: it reaches processes that are forked later."""


def make_certificates(folder: Path) -> None:
    authority = Authority(folder)
    os.environ[CERTIFICATES] = json.dumps(asdict(authority.config(authority.issue("worker"))))


class HostSharing(MemorySharing):
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


GROUPS = {
    "host": ["shm", "tcp"],
    "staged": ["tcp-staged", "cuda_ipc"],
    "nixl": ["nixl"],
    "tls": ["tcp-tls"],
    "gpu": ["cuda_ipc-gpu", "tcp-gpu"],
}
"""Owners of one group serve all its kinds at once."""


def group_of(kind: str) -> str:
    return next((group for group, kinds in GROUPS.items() if kind in kinds), "host")


def make_memory(group: str, pages: int, page_bytes: int, *further: PageRegion) -> Pages:
    match group:
        case "gpu":
            return DeviceMemory(pages, page_bytes, torch.device("cuda", 0), *further)
        case "staged":
            memory = DeviceMemory(pages, page_bytes, torch.device("cpu"), *further)
            memory.tensor.share_memory_()
            return memory
    return PageMemory(pages, page_bytes, *further)


def all_bytes(memory: Pages) -> np.ndarray:
    """All pages of the first group: a view, or a copy of what lies on a GPU."""
    if isinstance(memory, PageMemory):
        return memory.data
    assert isinstance(memory, DeviceMemory)
    return memory.regions[0].cpu().numpy()


def fill(memory: Pages, pages: Iterable[int], content: Callable[[int], np.ndarray]) -> None:
    """Writes to pages as an access does."""
    with contextlib.closing(memory.access(1)) as access:
        for page in pages:
            access.landing([page])[0][:] = content(page).data
            access.landed()


def make_transport(kind: str) -> PageTransport:
    match kind:
        case "shm":
            return ShmTransport()
        case "cuda_ipc-gpu":
            return CudaIpcTransport()
        case "cuda_ipc":
            return CudaIpcTransport(HostSharing())
        case "nixl":
            os.environ["UCX_TLS"] = "tcp"
            from twostroke.transfer.network.nixl import NixlTransport

            return NixlTransport("127.0.0.1")
        case "tcp-tls":
            return TcpTransport("127.0.0.1", wrapper=wrapper_for(TlsConfig(**json.loads(os.environ[CERTIFICATES]))))
        case "fake":
            return FakeTransport(TcpTransport("127.0.0.1"))
    return TcpTransport("127.0.0.1")
