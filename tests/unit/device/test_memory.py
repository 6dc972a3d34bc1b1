"""Page memory on a device, through the device that every machine has."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from twostroke.base.errors import ConfigError
from twostroke.base.ids import PageId
from twostroke.device.memory import DeviceMemory
from twostroke.kv_cache.memory import PageMemory, Pages
from twostroke.kv_cache.pool_size import refuse_more_than_free
from twostroke.kv_cache.shared import GenerationTable

PAGES, PAGE_BYTES = 6, 100
CPU = torch.device("cpu")


@pytest.fixture(params=["host", "device"])
def memory(request: pytest.FixtureRequest) -> Iterator[Pages]:
    ready = PageMemory(PAGES, PAGE_BYTES) if request.param == "host" else DeviceMemory(PAGES, PAGE_BYTES, CPU)
    yield ready
    ready.close()


def test_what_lands_in_pages_is_read_from_them(memory: Pages) -> None:
    access = memory.access(2)
    batches = [[3, 0], [5, 1], [2]]
    for batch in batches:
        for page, view in zip(batch, access.landing(batch), strict=True):
            view[:] = bytes([page + 1]) * PAGE_BYTES
        access.landed()
    access.synchronize()
    found = [[bytes(view) for view in views] for views in memory.access(3).read([[0, 1, 2], [3, 4], [5]])]
    assert found == [[bytes([c]) * PAGE_BYTES for c in row] for row in ([1, 2, 3], [4, 0], [6])]
    access.close()


def test_a_landing_that_was_given_up_leaves_the_window_usable(memory: Pages) -> None:
    access = memory.access(1)
    access.landing([2])
    access.synchronize()
    access.landing([1])[0][:] = b"x" * PAGE_BYTES
    access.landed()
    access.synchronize()
    assert [bytes(views[0]) for views in access.read([[1]])] == [b"x" * PAGE_BYTES]
    access.close()


def test_reading_that_was_given_up_leaves_the_window_usable(memory: Pages) -> None:
    access = memory.access(1)
    for page in range(PAGES):
        access.landing([page])[0][:] = bytes([page]) * PAGE_BYTES
        access.landed()
    access.synchronize()
    assert next(iter(access.read([[4], [5]])))[0][0] == 4
    assert [views[0][0] for views in access.read([[1], [2], [3]])] == [1, 2, 3]
    access.close()


def test_generations_count_on_the_host(memory: Pages) -> None:
    memory.begin_new_generation(PageId(2))
    assert memory.generations.tolist() == [0, 0, 1, 0, 0, 0]
    assert (memory.generation(PageId(2)), memory.scratch) == (1, PAGES)


def test_generations_of_a_device_are_read_by_whoever_got_the_descriptor() -> None:
    memory = DeviceMemory(PAGES, PAGE_BYTES, CPU)
    reader = GenerationTable.attach(os.dup(memory.table.fd), PAGES)
    memory.begin_new_generation(PageId(3))
    assert reader.generations.tolist() == [0, 0, 0, 1, 0, 0]
    with pytest.raises(ValueError, match="read-only"):
        reader.generations[0] = np.uint64(1)
    reader.close()
    memory.close()


def test_the_tensor_is_the_pages() -> None:
    memory = DeviceMemory(PAGES, PAGE_BYTES, CPU)
    assert (memory.regions[0].shape, memory.tensor.dtype) == ((PAGES + 1, PAGE_BYTES), torch.uint8)
    memory.regions[0][2] = 9
    assert [bytes(views[0]) for views in memory.access(1).read([[2]])] == [b"\t" * PAGE_BYTES]
    memory.close()


def test_what_a_device_cannot_hold_is_refused_by_the_bytes_that_are_missing() -> None:
    with pytest.raises(ConfigError, match=r"cuda:1 has 900 free: 100 bytes too many") as refusal:
        refuse_more_than_free(1000, 900, place="cuda:1")
    assert refusal.value.field == "kv_cache_memory"
    with pytest.raises(ConfigError, match="bytes too many"):
        DeviceMemory(1 << 20, 1 << 30, CPU)
