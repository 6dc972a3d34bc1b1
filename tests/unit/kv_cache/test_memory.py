"""Page memory: shared by descriptor, sealed, counted in generations, refused where it cannot fit."""

from __future__ import annotations

import gc
import mmap
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from twostroke.base.errors import ConfigError
from twostroke.base.ids import PageId
from twostroke.kv_cache.layout import PoolLayout
from twostroke.kv_cache.memory import PageMemory, available_memory_bytes, cgroup_free_bytes

PAGES, PAGE_BYTES = 5, 4096 + 64


@pytest.fixture
def memory() -> Iterator[PageMemory]:
    memory = PageMemory(PAGES, PAGE_BYTES)
    yield memory
    memory.close()


def attach(memory: PageMemory) -> PageMemory:
    return PageMemory.attach(os.dup(memory.fd), memory.layout)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_what_the_owner_writes_a_reader_sees(memory: PageMemory) -> None:
    reader = attach(memory)
    for page in range(PAGES):
        memory.page(PageId(page))[:] = page + 1
        memory.begin_new_generation(PageId(page))
    memory.begin_new_generation(PageId(3))
    assert [set(reader.page(PageId(page)).tolist()) for page in range(PAGES)] == [{page + 1} for page in range(PAGES)]
    assert [reader.generation(PageId(page)) for page in range(PAGES)] == [1, 1, 1, 2, 1]
    reader.close()


def test_pages_are_apart_from_each_other_and_from_their_generations(memory: PageMemory) -> None:
    memory.page(PageId(0))[:] = 0xFF
    memory.page(memory.scratch)[:] = 0xFF
    assert not memory.data[1:PAGES].any()
    assert not memory.generations.any()
    assert memory.data.shape == (PAGES + 1, PAGE_BYTES)


def test_pages_begin_on_a_page_of_the_system(memory: PageMemory) -> None:
    assert memory.data.ctypes.data % mmap.PAGESIZE == 0


def test_a_generation_outlasts_every_count_of_32_bits(memory: PageMemory) -> None:
    memory.generations[0] = 2**32 - 1
    memory.begin_new_generation(PageId(0))
    assert memory.generation(PageId(0)) == 2**32


def test_a_reader_can_write_neither_pages_nor_generations(memory: PageMemory) -> None:
    reader = attach(memory)
    with pytest.raises(ValueError, match="read-only"):
        reader.page(PageId(0))[0] = 1
    with pytest.raises(TypeError, match="read-only"):
        reader.begin_new_generation(PageId(0))
    reader.close()


def test_the_descriptor_gives_no_right_to_write_or_resize(memory: PageMemory) -> None:
    with pytest.raises(PermissionError):
        mmap.mmap(memory.fd, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        os.pwrite(memory.fd, b"x", 0)
    for size in (0, 2 * memory.total_bytes):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, size)
    memory.page(PageId(0))[:] = 7
    assert memory.page(PageId(0)).all()


def test_a_descriptor_that_went_through_a_socket_is_the_same_memory(memory: PageMemory) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.send_fds(ours, [b"\0"], [memory.fd])
        _, descriptors, _, _ = socket.recv_fds(theirs, 1, 1)
    reader = PageMemory.attach(descriptors[0], PoolLayout.of(PAGES, PAGE_BYTES))
    memory.page(PageId(2))[:] = 9
    assert (reader.page(PageId(2)) == 9).all()
    reader.close()


@pytest.mark.parametrize(("pages", "page_bytes"), [(PAGES + 1, PAGE_BYTES), (PAGES, PAGE_BYTES - 64), (10**6, 1)])
def test_a_memory_of_another_size_is_refused_and_the_descriptor_stays_the_callers(
    memory: PageMemory, pages: int, page_bytes: int
) -> None:
    descriptor = os.dup(memory.fd)
    with pytest.raises(ConfigError, match=f"{memory.total_bytes} bytes, expected"):
        PageMemory.attach(descriptor, PoolLayout.of(pages, page_bytes))
    os.close(descriptor)


def test_a_memory_that_its_owner_could_shrink_is_refused(memory: PageMemory) -> None:
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, memory.total_bytes)
    with pytest.raises(ConfigError, match="not sealed"):
        PageMemory.attach(unsealed, PoolLayout.of(PAGES, PAGE_BYTES))
    os.close(unsealed)


def test_what_cannot_fit_is_refused_by_its_flag_and_leaves_nothing_behind() -> None:
    before = open_descriptors()
    with pytest.raises(ConfigError, match=r"this machine has \d+ free") as refusal:
        PageMemory(1 << 20, 1 << 30)
    assert refusal.value.field == "kv_cache_memory"
    assert open_descriptors() == before


def test_closing_gives_back_descriptor_and_mapping() -> None:
    mappings, before = mappings_of_pages(), open_descriptors()
    memory = PageMemory(PAGES, PAGE_BYTES)
    assert mappings_of_pages() > mappings
    memory.close()
    assert open_descriptors() == before
    assert mappings_of_pages() == mappings


def test_a_view_that_is_still_held_survives_the_closing() -> None:
    mappings = mappings_of_pages()
    memory = PageMemory(PAGES, PAGE_BYTES)
    view = memory.page(PageId(1))
    view[:] = 3
    memory.close()
    assert (view == 3).all()
    del view
    assert mappings_of_pages() == mappings


def mappings_of_pages() -> int:
    """Returns how many there are in this process, in which other tests may have left some to the garbage collector."""
    gc.collect()
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("twostroke-pages")


def test_a_second_close_closes_nothing_of_somebody_elses() -> None:
    memory = PageMemory(PAGES, PAGE_BYTES)
    memory.close()
    stranger = os.open("/dev/null", os.O_RDONLY)
    with pytest.raises(AttributeError):
        memory.close()
    os.fstat(stranger)
    os.close(stranger)


def test_a_reader_outlives_its_owner(memory: PageMemory) -> None:
    owner = PageMemory(PAGES, PAGE_BYTES)
    reader = attach(owner)
    owner.page(PageId(4))[:] = 5
    owner.close()
    assert np.array_equal(reader.page(PageId(4)), np.full(PAGE_BYTES, 5, np.uint8))
    reader.close()


def test_the_headroom_of_a_cgroup_counts_cold_file_cache_as_free(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 500\nactive_file 100\n")
    assert cgroup_free_bytes(tmp_path, otherwise=7) == 600


def test_a_cgroup_without_a_limit_does_not_bind(tmp_path: Path) -> None:
    assert cgroup_free_bytes(tmp_path, otherwise=7) == 7
    (tmp_path / "memory.max").write_text("max\n")
    assert cgroup_free_bytes(tmp_path, otherwise=7) == 7


def test_this_machine_has_memory() -> None:
    assert available_memory_bytes() > 1 << 20
