"""The cuda_ipc transport: the owner shares its pool tensor, and a pull copies from device to device on one host.

Over the socket (`same_host_transport`) travel the descriptor of the owner's generations and a frame [pool handle].
Both ends may use one GPU, or two that reach each other's memory. `MemorySharing` is all that needs a GPU here.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

import torch

from twostroke.base.errors import PeerLost
from twostroke.device.memory import DeviceMemory
from twostroke.device.sharing import CudaSharing, MemorySharing
from twostroke.device.stream import copy_stream
from twostroke.kv_cache.shared import GenerationTable
from twostroke.transfer.base import Identity, PageCopy, PageEndpoint
from twostroke.transfer.same_host.same_host_transport import (
    SameHostPeer,
    SameHostTransport,
    receive_descriptor,
    refuse_changed,
)
from twostroke.transfer.sockets.frames import Deadline, check_fields, receive_frame, send_frame

STEP_PAGES = 64
"""Pages copied between two checks of the generations: enough to keep a device busy, and copied within moments."""
_HANDLE_LIMIT_BYTES = 4096
_HAND_OVER_S = 5.0


class CudaIpcTransport(SameHostTransport["_DevicePeer", DeviceMemory]):
    """Moves pages within a GPU or between two. Tests replace `sharing`, which is CUDA's by default."""

    name = "cuda_ipc"

    def __init__(self, sharing: MemorySharing | None = None) -> None:
        super().__init__(DeviceMemory)
        self._sharing = sharing or CudaSharing()

    def address(self, name: str, memory: DeviceMemory) -> str:
        return f"{name} {self._sharing.device_name(memory.device)}"

    def reaches(self, endpoint: PageEndpoint) -> bool:
        if self._memory is None or not super().reaches(endpoint):
            return False
        return self._sharing.reachable(_device_name(endpoint), self._memory.device) is not None

    def hand_over(self, sock: socket.socket, memory: DeviceMemory) -> None:
        socket.send_fds(sock, [b"\0"], [memory.table.fd])
        send_frame(sock, [self._sharing.share(memory.tensor)], Deadline.after(_HAND_OVER_S))

    def peer(self, endpoint: PageEndpoint, identity: Identity, memory: DeviceMemory) -> _DevicePeer:
        return _DevicePeer(endpoint, identity, memory, self._sharing)


class _DevicePeer(SameHostPeer):
    pages_per_copy = STEP_PAGES

    def __init__(
        self, endpoint: PageEndpoint, identity: Identity, memory: DeviceMemory, sharing: MemorySharing
    ) -> None:
        self._sharing = sharing
        self._device = memory.device
        self._layout = memory.layout
        self._local: torch.Tensor | None = memory.tensor
        self._remote: torch.Tensor | None = None
        self._table: GenerationTable | None = None
        self._stream = copy_stream(memory.device)
        super().__init__(endpoint, identity)

    def receive_memory(self, sock: socket.socket, deadline: Deadline) -> None:
        descriptor = receive_descriptor(sock, self.endpoint)
        try:
            self._table = GenerationTable.attach(descriptor, self.endpoint.layout.pages)
        except BaseException:
            os.close(descriptor)
            raise
        fields: list[Any] = receive_frame(sock, _HANDLE_LIMIT_BYTES, deadline)
        check_fields(fields, (bytes,))
        device = self._sharing.reachable(_device_name(self.endpoint), self._device)
        if device is None:
            raise PeerLost(f"{_device_name(self.endpoint)} cannot be reached from {self._device}")
        try:
            self._remote = self._sharing.open(fields[0], device)
        except Exception as error:  # any CUDA error: other drivers, separate containers
            raise PeerLost(f"cuda_ipc {self.endpoint.address}: its memory cannot be opened: {error}") from error

    def copy(self, copies: Sequence[PageCopy]) -> None:
        assert self._remote is not None, "copied before the handshake"
        assert self._local is not None
        self._refuse_changed(copies, after=False)
        try:
            for copy in copies:
                there, here = self.endpoint.layout.span(copy.remote), self._layout.span(copy.local)
                self._stream.copy(self._local[here], self._remote[there])
        finally:
            self._stream.synchronize()
        self._refuse_changed(copies, after=True)

    def release(self) -> None:
        if self._table is not None:
            self._table.close()
        self._table = self._remote = self._local = None

    def _refuse_changed(self, copies: Sequence[PageCopy], *, after: bool) -> None:
        assert self._table is not None
        generations = self._table.generations
        for copy in copies:
            refuse_changed(copy, int(generations[copy.remote]), after=after)


def _device_name(endpoint: PageEndpoint) -> str:
    return endpoint.address.partition(" ")[2]
