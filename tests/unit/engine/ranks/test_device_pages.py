"""Pages in parts on the devices of several ranks are read and written whole."""

from __future__ import annotations

import pytest
import torch

from twostroke.device.memory import DeviceMemory
from twostroke.engine.ranks.cuda import RankedDeviceMemory
from twostroke.kv_cache.layout import PageRegion, PoolLayout

PAGES, PART_BYTES, WINDOW_PART_BYTES = 4, 24, 16
CPU = torch.device("cpu")


def ranked(ranks: int, ranges: int) -> tuple[RankedDeviceMemory, list[torch.Tensor]]:
    """Returns pages of two groups, and what each rank has of them."""
    own = DeviceMemory(PAGES, PART_BYTES, CPU, PageRegion(2, WINDOW_PART_BYTES))
    layout = PoolLayout.of(PAGES, ranges * PART_BYTES, PageRegion(2, ranges * WINDOW_PART_BYTES))
    others = [torch.zeros_like(own.tensor) for _ in range(ranks - 1)]
    return RankedDeviceMemory(layout, ranges, own, others), [own.tensor, *others]


@pytest.mark.parametrize(("ranks", "ranges"), [(2, 2), (4, 2), (3, 1)])
def test_each_rank_has_its_range_of_what_lands_and_ranks_that_share_a_range_all_have_it(
    ranks: int, ranges: int
) -> None:
    memory, tensors = ranked(ranks, ranges)
    own = PoolLayout.of(PAGES, PART_BYTES, PageRegion(2, WINDOW_PART_BYTES))
    access = memory.access(2)
    written = {}
    for batch in ([3, 0], [5, 1], [4]):
        for page, view in zip(batch, access.landing(batch), strict=True):
            written[page] = torch.randint(0, 256, (len(view),), dtype=torch.uint8)
            view[:] = written[page].numpy().data
        access.landed()
    access.synchronize()
    for page, whole in written.items():
        for rank, tensor in enumerate(tensors):
            expected = whole.chunk(ranges)[rank // (ranks // ranges)]
            assert torch.equal(tensor[own.span(page)], expected), (page, rank)
    found = [[bytes(view) for view in views] for views in memory.access(3).read([[0, 1, 3], [4, 5]])]
    assert found == [[bytes(written[page].numpy()) for page in batch] for batch in ([0, 1, 3], [4, 5])]
    untouched = {2}
    assert not any(tensor[own.span(page)].any() for tensor in tensors for page in untouched)
    access.close()
    memory.close()
