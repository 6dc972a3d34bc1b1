"""What travels when a device's memory is shared, with torch's own halves of it stood in for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from twostroke.device.sharing import CudaSharing

SHARED = (3, b"\x01segment\xff", 4096, 512, b"/counters\x00", 7, b"\xfeevent", True)
"""A storage in the form in which torch shares it: its device, then what opens it."""


def test_a_pool_is_opened_with_what_it_was_shared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = torch.arange(24, dtype=torch.uint8)[8:].view(4, 4)
    opened: list[tuple[Any, ...]] = []

    def open_storage(*arguments: Any) -> torch.UntypedStorage:
        opened.append(arguments)
        return pool.untyped_storage()

    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", lambda _storage: SHARED)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", open_storage)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    sharing = CudaSharing()
    handle = sharing.share(pool)
    device = torch.device("cpu", 0)
    there = sharing.open(handle, device)
    assert opened == [(0, *SHARED[1:])], "on the device as the reader numbers it"
    assert there.tolist() == list(range(8, 24))
    assert there.data_ptr() == pool.data_ptr()
