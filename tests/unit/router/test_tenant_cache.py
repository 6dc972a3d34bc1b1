"""What is kept of tenants: apart, within the bound, and no tenant pushes another below its equal claim."""

from __future__ import annotations

import random

import pytest

from router.tenant_cache import ENTRY_BYTES, TENANT_BYTES, TenantCache, tenant_digest


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def test_a_tenant_finds_what_it_has_put_and_nothing_of_another() -> None:
    cache = TenantCache(10_000)
    cache.put("a", key(1), b"one")
    assert cache.get("a", key(1)) == b"one"
    assert cache.get("b", key(1)) is None
    cache.put("b", key(1), b"theirs")
    assert (cache.get("a", key(1)), cache.get("b", key(1))) == (b"one", b"theirs")


def test_the_least_recently_used_entry_of_a_tenant_goes_first() -> None:
    cache = TenantCache(TENANT_BYTES + 3 * (ENTRY_BYTES + 10))
    for number in range(3):
        cache.put("a", key(number), b"." * 10)
    assert cache.get("a", key(0)) is not None
    cache.put("a", key(3), b"." * 10)
    assert [cache.get("a", key(number)) is not None for number in range(4)] == [True, False, True, True]


def test_a_flood_of_one_tenant_leaves_another_its_equal_claim() -> None:
    cache = TenantCache(2 * TENANT_BYTES + 10 * (ENTRY_BYTES + 10))
    for number in range(5):
        cache.put("quiet", key(number), b"." * 10)
    for number in range(1_000):
        cache.put("flood", key(number), b"." * 10)
        assert all(cache.get("quiet", key(kept)) is not None for kept in range(5))
    assert cache.get("flood", key(999)) is not None


def test_a_tenant_that_comes_later_gets_its_claim_from_the_one_that_has_most() -> None:
    cache = TenantCache(2 * TENANT_BYTES + 10 * (ENTRY_BYTES + 10))
    for number in range(10):
        cache.put("early", key(number), b"." * 10)
    for number in range(5):
        cache.put("late", key(number), b"." * 10)
    assert all(cache.get("late", key(number)) is not None for number in range(5))


def test_tenants_that_are_gone_take_no_room_for_ever() -> None:
    cache = TenantCache(2 * TENANT_BYTES + 10 * (ENTRY_BYTES + 10))
    for tenant in range(10):
        cache.put(f"gone {tenant}", key(0), b"." * 10)
    for number in range(40):
        cache.put("here", key(number), b"." * 10)
    assert all(cache.get("here", key(number)) is not None for number in range(30, 40))


def test_nothing_is_kept_without_room() -> None:
    cache = TenantCache(0)
    cache.put("a", key(1), b"")
    assert cache.get("a", key(1)) is None
    assert cache.total_bytes == 0


@pytest.mark.parametrize("seed", range(3))
def test_random_histories_stay_within_the_bound_and_never_find_another_value(seed: int) -> None:
    draw, cache = random.Random(seed), TenantCache(5_000)
    said: dict[tuple[str, bytes], bytes] = {}
    for _ in range(3_000):
        tenant, name = draw.choice("abcd"), key(draw.randrange(30))
        if draw.random() < 0.5:
            said[tenant, name] = draw.randbytes(draw.randrange(400))
            cache.put(tenant, name, said[tenant, name])
        else:
            assert cache.get(tenant, name) in (None, said.get((tenant, name)))
        held = [len(value) + ENTRY_BYTES for each in cache._tenants.values() for value in each.values.values()]
        assert cache.total_bytes == sum(held) + TENANT_BYTES * len(cache._tenants) <= 5_000


def test_tenants_count_themselves_and_long_names_take_no_more_than_short_ones() -> None:
    assert len({len(tenant_digest(name)) for name in ("", "a", "n" * 60_000)}) == 1
    cache = TenantCache(20 * (TENANT_BYTES + ENTRY_BYTES + 10))
    for tenant in range(1_000):
        cache.put(tenant_digest(str(tenant)), key(0), b"." * 10)
    assert len(cache._tenants) <= 20
