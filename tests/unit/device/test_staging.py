"""Staged pages over a stream that copies as late as it may: a buffer that is used too early shows."""

from __future__ import annotations

from collections.abc import Callable

import torch

from twostroke.device.staging import StagedWindow
from twostroke.device.stream import CopyStream, Mark

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


def a_pool() -> torch.Tensor:
    return torch.arange(PAGES, dtype=torch.uint8)[:, None].expand(PAGES, PAGE_BYTES).contiguous()


def test_every_batch_is_read_after_its_copy_and_before_the_next_one_overwrites_it() -> None:
    window = StagedWindow(a_pool(), 2, LazyStream())
    seen = []
    for views in window.read([[0, 1], [2, 3], [4], [5, 6], [7, 8]]):
        seen += [view[0] for view in views]
    assert seen == list(range(PAGES))


def test_the_next_batch_is_asked_for_before_this_one_is_handed_out() -> None:
    stream = LazyStream()
    batches = StagedWindow(a_pool(), 1, stream).read([[0], [1], [2]])
    next(batches)
    assert (len(stream.asked), stream.done) == (2, 1)
    next(batches)
    assert (len(stream.asked), stream.done) == (3, 2)


def test_a_buffer_is_not_filled_again_before_it_has_landed() -> None:
    pool, stream = a_pool(), LazyStream()
    window = StagedWindow(pool, 1, stream)
    for page in range(PAGES):
        window.landing([page])[0][:] = bytes([100 + page]) * PAGE_BYTES
        window.landed()
    assert pool[PAGES - 1, 0] == PAGES - 1
    window.synchronize()
    assert pool[:, 0].tolist() == [100 + page for page in range(PAGES)]
