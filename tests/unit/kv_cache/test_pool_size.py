"""The memory bill of a pool: pages, waste and the number of requests, against counting one by one."""

from __future__ import annotations

import random

import pytest

from twostroke.base.errors import ConfigError
from twostroke.kv_cache.memory import PageMemory
from twostroke.kv_cache.pool_size import (
    LengthSpread,
    PoolSize,
    enough_pages,
    host_pool_bytes,
    refuse_more_than_free,
)

PAGE_BYTES = 1000


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 4096])
def test_a_request_wastes_what_its_last_page_has_left(tokens: int) -> None:
    request = PoolSize(100, PAGE_BYTES, 16).request(tokens)
    assert 0 <= request.waste_tokens < 16
    assert request.pages * 16 == tokens + request.waste_tokens


def test_so_many_requests_fit_as_can_be_placed_one_by_one() -> None:
    draws = random.Random(1)
    for _ in range(300):
        size = PoolSize(draws.randrange(1, 500), PAGE_BYTES, 16)
        tokens, shared = draws.randrange(1, 900), draws.choice([0, draws.randrange(900)])
        common = min(shared, tokens) // 16
        left, placed = size.pages - common, 0
        while left >= max(1, -(-tokens // 16) - common):
            left -= max(1, -(-tokens // 16) - common)
            placed += 1
        assert size.concurrent(tokens, shared) == placed


def test_lengths_that_differ_leave_room_for_fewer_than_their_mean() -> None:
    size = PoolSize(1000, PAGE_BYTES, 16)
    assert size.concurrent_of(LengthSpread(10.0, 0.0)) == size.concurrent_of(LengthSpread(10.0, 7.0)) == 100
    assert size.concurrent_of(LengthSpread(10.0, 0.0), 2.3) == 100, "equal lengths need no margin"
    kept = size.concurrent_of(LengthSpread(10.0, 7.0), 2.33)
    draws = random.Random(2)
    sums = [sum(draws.choice([3, 17]) for _ in range(kept)) for _ in range(2000)]
    assert 0.002 < sum(total > 1000 for total in sums) / 2000 < 0.03, "one in a hundred does not fit"


def test_a_pool_takes_what_its_memory_takes() -> None:
    memory = PageMemory(7, PAGE_BYTES)
    assert memory.total_bytes == host_pool_bytes(7, PAGE_BYTES)
    memory.close()


def test_refusals_say_what_to_change_and_by_how_many_bytes() -> None:
    with pytest.raises(ConfigError, match=r"give 501 bytes more .--kv-cache-memory 2000.") as refusal:
        enough_pages(1499, PAGE_BYTES)
    assert refusal.value.field == "kv_cache_memory"
    assert enough_pages(2000, PAGE_BYTES) == 2
    with pytest.raises(ConfigError, match=r"3 workers with 400 bytes .* 200 bytes too many; give 67 bytes less, or"):
        refuse_more_than_free(400, 1000, workers=3)
    refuse_more_than_free(333, 1000, workers=3)
    with pytest.raises(ConfigError, match=r"use --kv-cache-memory 63000 .* or --max-model-len 160 or less"):
        PoolSize(10, PAGE_BYTES, 16).check(1000)
