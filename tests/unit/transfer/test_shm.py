"""What a process that holds another's page memory can do with it: read."""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twostroke.base.errors import ConfigError, PeerLost, StaleEpoch, TransferFailed
from twostroke.base.ids import Epoch, PageId
from twostroke.kv_cache.layout import PoolLayout
from twostroke.kv_cache.memory import PageMemory
from twostroke.security.trusted_paths import private_folder
from twostroke.transfer.base import SOCKETS, Identity, page_copies
from twostroke.transfer.same_host.same_host_transport import SUFFIX
from twostroke.transfer.same_host.shm import ShmTransport, _ShmPeer
from twostroke.transfer.sockets.frames import Deadline
from twostroke.transfer.sockets.handshake import introduce


def unix_sockets() -> str:
    """Returns the Unix sockets of this network namespace, abstract ones by name."""
    return Path("/proc/net/unix").read_text(encoding="utf-8")


async def handed_over(endpoint: Any, reader: Identity) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(str(private_folder(SOCKETS) / endpoint.address))
        introduce(sock, reader, endpoint, Deadline.after(5.0))
        _, descriptors, _, _ = socket.recv_fds(sock, 1, 4)
    assert len(descriptors) == 1
    return descriptors[0]


async def test_a_reader_can_neither_write_nor_resize_the_owners_memory(steady_owner: Any) -> None:
    endpoint = steady_owner.endpoints["shm"]
    descriptor = await handed_over(endpoint, Identity("reader", Epoch(1, 1), endpoint.fingerprint, "secret"))
    size = os.fstat(descriptor).st_size
    again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
    for handle in (descriptor, again):
        with pytest.raises(PermissionError):
            mmap.mmap(handle, size)
        with pytest.raises(PermissionError):
            os.pwrite(handle, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(handle, 0)
    memory = PageMemory.attach(descriptor, endpoint.layout)
    assert np.array_equal(memory.data[3], steady_owner.content(3))
    with pytest.raises(ValueError, match="read-only"):
        memory.data[3, 0] = 1
    memory.close()
    os.close(again)


async def test_memory_that_its_owner_could_still_shrink_is_not_mapped() -> None:
    descriptor = os.memfd_create("unsealed", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, mmap.PAGESIZE + 3 * 100)
    with pytest.raises(ConfigError, match="not sealed"):
        PageMemory.attach(descriptor, PoolLayout.of(2, 100))
    os.close(descriptor)


def test_small_pages_that_are_reused_while_they_are_copied_together_fail_the_copy() -> None:
    ours, theirs = PageMemory(4, 64), PageMemory(4, 64)

    class Reused(np.ndarray[Any, Any]):
        """Rows of pages, of which one gets another writer while they are read."""

        def __getitem__(self, pages: Any) -> Any:
            theirs.begin_new_generation(PageId(2))
            return super().__getitem__(pages)

    theirs.regions = (theirs.data.view(Reused),)
    peer = object.__new__(_ShmPeer)
    peer._local, peer._remote = ours, theirs
    with pytest.raises(TransferFailed, match="page 2 was reused while it was copied: generation 1, not 0"):
        peer.copy(page_copies([1, 2], [PageId(0), PageId(1)], [0, 0]))
    theirs.regions = ()
    for memory in (ours, theirs):
        memory.close()


async def test_only_the_same_host_and_network_namespace_is_reached(steady_owner: Any) -> None:
    transport = ShmTransport()
    endpoint = steady_owner.endpoints["shm"]
    assert transport.reaches(endpoint)
    assert not transport.reaches(replace(endpoint, host_id="another boot/1"))
    assert not transport.reaches(replace(endpoint, host_id=endpoint.host_id + "0"))
    assert not transport.reaches(replace(endpoint, transport="tcp"))


async def test_no_memory_is_handed_to_whoever_means_another_epoch(steady_owner: Any) -> None:
    endpoint = replace(steady_owner.endpoints["shm"], epoch=Epoch(1, 1))
    with pytest.raises(StaleEpoch):
        await handed_over(endpoint, Identity("reader", Epoch(1, 1), endpoint.fingerprint, "secret"))


async def test_a_socket_without_its_owner_leaves_no_trace(start_owner: Callable[..., Any]) -> None:
    owner = start_owner()
    name = owner.endpoints["shm"].address
    bound_as = name.removesuffix(SUFFIX)  # the kernel knows a socket by the name that it was bound to
    assert bound_as in unix_sockets()
    owner.kill()
    assert bound_as not in unix_sockets()
    transport, memory = ShmTransport(), PageMemory(64, 5000)
    await transport.open(memory, Identity("reader", Epoch(1, 1), "fingerprint-a", "secret"))
    with pytest.raises(PeerLost, match=name):
        await transport.connect(owner.endpoints["shm"], 5.0)
    await transport.close()
    memory.close()
