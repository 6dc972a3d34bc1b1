"""Staged pages over a stream that copies as late as it may: a buffer that is used too early shows."""

from __future__ import annotations

from collections.abc import Callable

import torch

from twostroke.device.staging import PoolPart, StagedAccess
from twostroke.device.stream import CopyStream, Mark
from twostroke.kv_cache.layout import PageRegion, PoolLayout

PAGES, PAGE_BYTES = 9, 16


class LazyStream(CopyStream):
    """Copies nothing before somebody waits for it."""

    def __init__(self) -> None:
        self.asked: list[Callable[[], object]] = []
        self.done = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.asked.append(lambda: target.copy_(source))

    def mark(self) -> Mark:
        upto = len(self.asked)

        def wait() -> None:
            while self.done < upto:
                self.asked[self.done]()
                self.done += 1

        return wait


LAYOUT = PoolLayout.of(PAGES - 1, PAGE_BYTES)
"""The last page is the scratch page."""


def a_pool() -> torch.Tensor:
    return torch.arange(PAGES, dtype=torch.uint8).repeat_interleave(PAGE_BYTES)


def access_over(pool: torch.Tensor, layout: PoolLayout, batch_pages: int, stream: CopyStream) -> StagedAccess:
    return StagedAccess([PoolPart(pool, layout, stream)], layout, batch_pages)


def test_every_batch_is_read_after_its_copy_and_before_the_next_one_overwrites_it() -> None:
    access = access_over(a_pool(), LAYOUT, 2, LazyStream())
    seen = []
    for views in access.read([[0, 1], [2, 3], [4], [5, 6], [7, 8]]):
        seen += [view[0] for view in views]
    assert seen == list(range(PAGES))


def test_the_next_batch_is_asked_for_before_this_one_is_handed_out() -> None:
    stream = LazyStream()
    batches = access_over(a_pool(), LAYOUT, 1, stream).read([[0], [1], [2]])
    next(batches)
    assert (len(stream.asked), stream.done) == (2, 1)
    next(batches)
    assert (len(stream.asked), stream.done) == (3, 2)


def test_a_buffer_is_not_filled_again_before_it_has_landed() -> None:
    pool, stream = a_pool(), LazyStream()
    access = access_over(pool, LAYOUT, 1, stream)
    for page in range(PAGES):
        access.landing([page])[0][:] = bytes([100 + page]) * PAGE_BYTES
        access.landed()
    assert pool[-1] == PAGES - 1
    access.synchronize()
    assert pool[::PAGE_BYTES].tolist() == [100 + page for page in range(PAGES)]


def test_pages_of_two_groups_pass_through_the_same_buffers_each_at_its_length() -> None:
    layout = PoolLayout.of(2, 16, PageRegion(3, 40))
    pool = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    access = access_over(pool, layout, 2, LazyStream())
    for pages in ([0, 3], [2, 4], [1]):
        for page, view in zip(pages, access.landing(pages), strict=True):
            assert len(view) == (16 if page < 2 else 40)
            view[:] = bytes([page + 1]) * len(view)
        access.landed()
    access.synchronize()
    assert [[*pool[layout.span(page)]] for page in range(5)] == [
        [page + 1] * (16 if page < 2 else 40) for page in range(5)
    ]
    read = [[bytes(view) for view in views] for views in access.read([[4, 1], [2]])]
    assert read == [[b"\5" * 40, b"\2" * 16], [b"\3" * 40]]
