"""How far workers can go on with their window parts: for all at once as for each alone, without a walk for each."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.routing.part_depths import deepest_of_all
from twostroke.kv_cache.windows.shape import deepest

BLOCKS, WORKERS = 12, 4


@given(
    pages=st.lists(st.integers(0, BLOCKS), min_size=WORKERS, max_size=WORKERS),
    parts=st.lists(st.integers(0, 2**WORKERS - 1), min_size=BLOCKS, max_size=BLOCKS),
    tail_blocks=st.integers(1, 6),
)
def test_all_at_once_go_on_where_each_alone_does(pages: list[int], parts: list[int], tail_blocks: int) -> None:
    found = deepest_of_all(((depth, 1 << worker) for worker, depth in enumerate(pages)), tail_blocks, parts.__getitem__)
    depths = {worker: depth for depth, mask in found for worker in range(WORKERS) if mask >> worker & 1}
    for worker, depth in enumerate(pages):
        alone = deepest(depth, tail_blocks, lambda block, bit=1 << worker: bool(parts[block] & bit))
        assert depths.get(worker, 0) == alone
    assert [depth for depth, _ in found] == sorted({depth for depth, _ in found}, reverse=True)


def test_a_block_is_looked_at_once_however_many_workers_have_gaps() -> None:
    looks: list[int] = []

    def parts(block: int) -> int:
        looks.append(block)
        return 0 if block % 7 == 0 else 2**30 - 1

    assert deepest_of_all([(1000, 1 << worker) for worker in range(30)], 32, parts) == []
    assert len(looks) == len(set(looks)) == 1000


def test_few_blocks_are_looked_at_where_the_last_parts_are_there() -> None:
    looks: list[int] = []

    def parts(block: int) -> int:
        looks.append(block)
        return 1

    assert deepest_of_all([(1000, 1)], 8, parts) == [(1000, 1)]
    assert len(looks) <= 16
