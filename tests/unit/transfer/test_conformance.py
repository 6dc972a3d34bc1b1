"""What every page transport does alike. Owners of pages are processes of their own."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.unit.transfer.makers import ONE_SIDED, STAGED
from twostroke.base.errors import FingerprintMismatch, InvalidRequest, PeerLost, StaleEpoch, Unauthenticated
from twostroke.base.ids import Epoch, PageId
from twostroke.kv_cache.layout import PageRegion
from twostroke.transfer.base import PageCopy, ReadOutcome, digest

Make = Callable[..., Any]
BIG_PAGES, BIG_PAGE_BYTES = 128, 512 << 10
"""64 MiB: far more than socket buffers hold, so a transfer that has begun is not over soon."""


def pairs_of(pages: int, seed: int) -> list[tuple[int, int]]:
    """Random distinct remote pages (never page 9) to random distinct local ones."""
    draw = random.Random(seed)
    return list(zip(draw.sample([p for p in range(64) if p != 9], pages), draw.sample(range(64), pages), strict=True))


async def test_scattered_pages_arrive_where_they_belong_and_nowhere_else(reader: Any, steady_owner: Any) -> None:
    peer = await reader.connect(steady_owner)
    pairs = pairs_of(40, seed=1)
    result = await reader.pull(peer, pairs)
    assert (result.outcome, result.copied_bytes) == (ReadOutcome.DONE, 40 * 5000)
    for remote, local in pairs:
        assert np.array_equal(reader.page(local), steady_owner.content(remote))
        assert digest(reader.page(local)) == digest(steady_owner.content(remote))
    for local in set(range(65)) - {local for _, local in pairs}:
        assert not reader.page(local).any()


async def test_pages_of_two_groups_arrive_in_one_pull_each_at_its_length(start_owner: Make, make_reader: Make) -> None:
    owner = start_owner(pages=8, page_bytes=5000, further=[(30, 70_000)])
    reader = make_reader(5, 5000, PageRegion(20, 70_000))
    await reader.open()
    peer = await reader.connect(owner)
    pairs = [(7, 0), (8, 24), (37, 5), (3, 4), (20, 13), (0, 2)]
    result = await reader.pull(peer, pairs)
    assert (result.outcome, result.copied_bytes) == (ReadOutcome.DONE, 3 * 5000 + 3 * 70_000)
    for remote, local in pairs:
        assert np.array_equal(reader.page(local), owner.content(remote))
    for local in set(range(25)) - {local for _, local in pairs}:
        assert not reader.page(local).any()
    with pytest.raises(InvalidRequest, match="page 7 and local page 5 are of different page groups"):
        await reader.pull(peer, [(8, 6), (7, 5)])


async def test_a_peer_whose_groups_have_other_pages_is_refused(start_owner: Make, make_reader: Make) -> None:
    owner = start_owner(pages=8, page_bytes=5000, further=[(30, 7000)])
    for reader in (make_reader(8, 5000), make_reader(8, 5000, PageRegion(30, 7004))):
        await reader.open()
        with pytest.raises(FingerprintMismatch, match=r"\(5000, 7000\)"):
            await reader.connect(owner)


async def test_a_pull_of_nothing_is_done(reader: Any, steady_owner: Any) -> None:
    result = await reader.pull(await reader.connect(steady_owner), [])
    assert (result.outcome, result.copied_bytes) == (ReadOutcome.DONE, 0)


async def test_many_pulls_from_several_peers_at_once(reader: Any, steady_owner: Any, start_owner: Make) -> None:
    owners = [steady_owner, start_owner(worker_id="second", seed=50), start_owner(worker_id="third", seed=90)]
    peers = [await reader.connect(owner) for owner in owners]
    plan = [(local, local % 3, remote) for remote, local in pairs_of(60, seed=2)]
    results = await asyncio.gather(*(reader.pull(peers[who], [(remote, local)]) for local, who, remote in plan))
    assert {result.outcome for result in results} == {ReadOutcome.DONE}
    for local, who, remote in plan:
        assert np.array_equal(reader.page(local), owners[who].content(remote))


async def test_connecting_twice_gives_the_same_peer(reader: Any, steady_owner: Any) -> None:
    first = await reader.connect(steady_owner)
    again, also = await asyncio.gather(reader.connect(steady_owner), reader.connect(steady_owner))
    assert first is again is also


async def test_pages_out_of_bounds_are_refused_before_anything_moves(reader: Any, steady_owner: Any) -> None:
    peer = await reader.connect(steady_owner)
    for remote, local, generation in ((64, 0, 0), (-1, 0, 0), (0, 64, 0), (0, -1, 0), (0, 0, -1), (0, 0, 1 << 64)):
        with pytest.raises(InvalidRequest, match=r"out of bounds|64-bit"):
            reader.transport.pull(peer, [PageCopy(PageId(remote), PageId(local), generation)], 5.0)
    with pytest.raises(InvalidRequest, match="two copies"):
        await reader.pull(peer, [(1, 5), (2, 5)])
    assert not reader.data.any()


async def test_a_page_of_another_generation_fails_the_pull_but_not_the_peer(reader: Any, steady_owner: Any) -> None:
    peer = await reader.connect(steady_owner)
    result = await reader.pull(peer, [(1, 1), (9, 2), (3, 3)])
    assert result.outcome is ReadOutcome.FAILED
    assert "page 9 has generation 1, not 0" in result.reason
    fresh = reader.transport.pull(peer, [PageCopy(PageId(9), PageId(2), 1)], 5.0)
    assert (await reader.transport.wait(fresh)).outcome is ReadOutcome.DONE
    assert (reader.page(2) == 0xEE).all()


async def test_a_page_that_is_reused_while_it_is_copied_fails_the_pull(
    kind: str, make_reader: Make, two_in_one_process: None
) -> None:
    pages = 32 if kind in STAGED else 1  # of those nothing is seen before the first page is complete
    owner, reader = make_reader(pages, (64 << 20) // pages), make_reader(pages, (64 << 20) // pages)
    owner.fill(7)
    endpoint = await owner.open(worker_id="owner")
    await reader.open()
    peer = await reader.transport.connect(endpoint, 5.0)
    last = PageId(pages - 1)
    for _ in range(20):  # the copy may end before this thread gets to reuse the page: then once more
        reader.fill(0)
        copies = [PageCopy(PageId(page), PageId(page), owner.memory.generation(page)) for page in range(pages)]
        transfer = reader.transport.pull(peer, copies, 20.0)
        while not reader.data[0, 0]:  # memory has no events
            await asyncio.sleep(0)
        owner.memory.begin_new_generation(last)
        result = await reader.transport.wait(transfer)
        if result.outcome is not ReadOutcome.DONE:
            break
    assert result.outcome is ReadOutcome.FAILED
    assert f"generation {owner.memory.generation(last)}" in result.reason


async def test_a_wrong_token_is_refused(make_reader: Make, steady_owner: Any) -> None:
    reader = make_reader()
    await reader.open(token="guess")
    with pytest.raises(Unauthenticated, match="token"):
        await reader.connect(steady_owner)


async def test_other_fingerprints_are_refused_with_both_values(make_reader: Make, steady_owner: Any) -> None:
    reader = make_reader()
    await reader.open(fingerprint="fingerprint-b")
    with pytest.raises(FingerprintMismatch, match=r"fingerprint-a.*fingerprint-b"):
        await reader.connect(steady_owner)
    # Whoever was told a wrong fingerprint by a third party is refused by the owner itself.
    endpoint = dataclasses.replace(steady_owner.endpoints[reader.transport.name], fingerprint="fingerprint-b")
    with pytest.raises(FingerprintMismatch, match=r"fingerprint-a.*fingerprint-b"):
        await reader.transport.connect(endpoint, 5.0)


async def test_other_page_sizes_are_refused(make_reader: Make, steady_owner: Any) -> None:
    reader = make_reader(8, 4999)
    await reader.open()
    with pytest.raises(FingerprintMismatch, match=r"5000.*4999"):
        await reader.connect(steady_owner)


async def test_an_owner_that_lives_another_epoch_is_refused(reader: Any, steady_owner: Any) -> None:
    endpoint = steady_owner.endpoints[reader.transport.name]
    stale = dataclasses.replace(endpoint, epoch=Epoch.begin(endpoint.epoch.incarnation))
    with pytest.raises(StaleEpoch, match=f"{stale.epoch}.*{endpoint.epoch}"):
        await reader.transport.connect(stale, 5.0)
    assert (await reader.pull(await reader.connect(steady_owner), [(1, 1)])).outcome is ReadOutcome.DONE


async def test_an_earlier_life_of_a_reader_is_refused_after_a_later_one(
    make_reader: Make, two_in_one_process: None
) -> None:
    owner, first, later, earlier = make_reader(), make_reader(), make_reader(), make_reader()
    endpoint = await owner.open(worker_id="owner")
    for reader, incarnation in ((first, 1), (later, 3), (earlier, 2)):
        await reader.open(epoch=Epoch.begin(incarnation))
    for reader in (first, later):
        await reader.transport.connect(endpoint, 5.0)
    with pytest.raises(StaleEpoch, match="incarnation 2, but 3"):
        await earlier.transport.connect(endpoint, 5.0)


async def test_a_dead_peer_is_lost_at_connect_and_at_once(reader: Any, start_owner: Make) -> None:
    owner = start_owner()
    owner.kill()
    with pytest.raises(PeerLost, match=owner.endpoints[reader.transport.name].address):
        await reader.connect(owner)


async def test_pulls_begun_after_the_peers_death_fail(reader: Any, start_owner: Make) -> None:
    owner = start_owner()
    peer = await reader.connect(owner)
    assert (await reader.pull(peer, [(1, 1)])).outcome is ReadOutcome.DONE
    owner.kill()
    result = await reader.pull(peer, [(2, 2)])
    assert result.outcome is ReadOutcome.FAILED
    assert result.reason
    assert not reader.page(2).any()


async def begin_big_pull(kind: str, make_reader: Make, start_owner: Make, deadline_s: float) -> Any:
    """A transfer whose owner was frozen after the first page had arrived, and before the last one had (where the owner
    has a part in it)."""
    for attempt in range(5):
        owner = start_owner(pages=BIG_PAGES, page_bytes=BIG_PAGE_BYTES, worker_id=f"owner-{attempt}")
        reader = make_reader(BIG_PAGES, BIG_PAGE_BYTES)
        await reader.open()
        peer = await reader.connect(owner)
        pairs = [(page, BIG_PAGES - 1 - page) for page in range(BIG_PAGES)]
        started = time.monotonic()
        transfer = reader.transport.pull(
            peer, [PageCopy(PageId(remote), PageId(local), 0) for remote, local in pairs], deadline_s
        )
        while not reader.page(pairs[0][1]).any():  # memory has no events
            await asyncio.sleep(0)
        owner.freeze()
        if kind in ONE_SIDED or not reader.page(pairs[-1][1]).any():
            return owner, reader, peer, transfer, started
    raise AssertionError("the owner was never frozen in time")


async def test_a_peer_that_dies_in_mid_transfer(kind: str, make_reader: Make, start_owner: Make) -> None:
    owner, reader, _, transfer, _ = await begin_big_pull(kind, make_reader, start_owner, deadline_s=60.0)
    owner.kill()
    result = await reader.transport.wait(transfer)
    if kind in ONE_SIDED:  # the dead write no more: what was announced is still there
        assert result.outcome is ReadOutcome.DONE
        assert np.array_equal(reader.page(0), owner.content(BIG_PAGES - 1))
    else:
        assert result.outcome is ReadOutcome.FAILED
        assert result.copied_bytes < BIG_PAGES * BIG_PAGE_BYTES
    await reader.transport.fence(transfer)


async def test_a_frozen_peer_expires_and_after_the_fence_no_byte_changes(
    kind: str, make_reader: Make, start_owner: Make
) -> None:
    owner, reader, peer, transfer, started = await begin_big_pull(kind, make_reader, start_owner, deadline_s=1.0)
    queued = [reader.transport.pull(peer, [PageCopy(PageId(1), PageId(0), 0)], 1.0) for _ in range(4)]
    result = await reader.transport.wait(transfer)
    if kind in ONE_SIDED:  # nothing of the owner runs during a pull
        assert result.outcome is ReadOutcome.DONE
        return
    assert result.outcome is ReadOutcome.EXPIRED
    assert 1.0 <= time.monotonic() - started < 60.0
    for other in queued:
        assert (await reader.transport.wait(other)).outcome is ReadOutcome.EXPIRED
    for each in (transfer, *queued):
        await reader.transport.fence(each)
    reader.fill(0xAB)  # the pages' next owner
    owner.thaw()
    owner.tell("ping")
    await asyncio.sleep(0.2)
    assert (reader.data == 0xAB).all()
    assert (await reader.pull(peer, [(5, 5)])).outcome is ReadOutcome.DONE
    assert np.array_equal(reader.page(5), owner.content(5))


async def test_connecting_to_a_frozen_peer_ends_at_the_deadline(reader: Any, start_owner: Make) -> None:
    owner = start_owner()
    owner.freeze()
    with pytest.raises(PeerLost, match="no answer within"):
        await reader.transport.connect(owner.endpoints[reader.transport.name], 0.2)


async def test_readers_that_die_in_mid_transfer_do_the_owner_no_harm(
    make_reader: Make, start_owner: Make, start_busy_reader: Make
) -> None:
    owner, reader = start_owner(pages=64, page_bytes=256 << 10), make_reader(64, 256 << 10)
    await reader.open()
    endpoint = owner.endpoints[reader.transport.name]
    for attempt in range(4):
        doomed = start_busy_reader(endpoint, 30.0)
        await asyncio.sleep(0.01 + 0.007 * attempt)
        doomed.kill()
    peer = await reader.connect(owner)
    assert (await reader.pull(peer, [(page, page) for page in range(64)])).outcome is ReadOutcome.DONE
    assert np.array_equal(reader.page(63), owner.content(63))
    assert owner.is_alive


async def test_a_reader_that_freezes_in_mid_transfer_does_the_owner_no_harm(
    make_reader: Make, start_owner: Make, start_busy_reader: Make
) -> None:
    owner, reader = start_owner(pages=64, page_bytes=256 << 10), make_reader(64, 256 << 10)
    await reader.open()
    frozen = start_busy_reader(owner.endpoints[reader.transport.name], 0.3)
    await asyncio.sleep(0.02)
    frozen.freeze()
    peer = await reader.connect(owner)
    pairs = [(page, 63 - page) for page in range(64)]
    assert (await reader.pull(peer, pairs)).outcome is ReadOutcome.DONE
    await asyncio.sleep(0.5)  # past the deadline of the frozen one
    assert (await reader.pull(peer, pairs)).outcome is ReadOutcome.DONE
    frozen.thaw()
    await asyncio.sleep(0.1)
    assert frozen.is_alive
    assert (await reader.pull(peer, pairs)).outcome is ReadOutcome.DONE
    assert owner.is_alive


async def test_a_stuck_peer_does_not_hold_up_others(reader: Any, steady_owner: Any, start_owner: Make) -> None:
    stuck = start_owner()
    stuck_peer, healthy = await reader.connect(stuck), await reader.connect(steady_owner)
    stuck.freeze()
    hanging = [reader.transport.pull(stuck_peer, [PageCopy(PageId(1), PageId(page), 0)], 30.0) for page in range(8)]
    assert (await reader.pull(healthy, [(3, 33)], deadline_s=10.0)).outcome is ReadOutcome.DONE
    for transfer in hanging:
        await reader.transport.fence(transfer)


async def test_a_fence_ends_a_transfer_long_before_its_deadline(
    kind: str, make_reader: Make, start_owner: Make
) -> None:
    _, reader, _, transfer, started = await begin_big_pull(kind, make_reader, start_owner, deadline_s=60.0)
    await reader.transport.fence(transfer)
    after = reader.data.copy()
    result = await reader.transport.wait(transfer)
    assert time.monotonic() - started < 30.0
    assert kind in ONE_SIDED or result.outcome is ReadOutcome.FAILED
    assert np.array_equal(reader.data, after)


async def test_a_deadline_that_has_passed_copies_nothing(reader: Any, steady_owner: Any) -> None:
    peer = await reader.connect(steady_owner)
    transfer = reader.transport.pull(peer, [PageCopy(PageId(1), PageId(1), 0)], 0.0)
    assert (await reader.transport.wait(transfer)).outcome is ReadOutcome.EXPIRED
    await reader.transport.fence(transfer)
    assert not reader.page(1).any()
    assert (await reader.pull(peer, [(2, 1)])).outcome is ReadOutcome.DONE
    assert np.array_equal(reader.page(1), steady_owner.content(2))


async def test_a_restarted_peer_is_reached_under_its_new_epoch(reader: Any, start_owner: Make) -> None:
    before = start_owner(incarnation=1, seed=1)
    old = await reader.connect(before)
    before.kill()
    after = start_owner(incarnation=2, seed=60)
    new = await reader.connect(after)
    assert new is not old
    assert (await reader.pull(new, [(1, 1)])).outcome is ReadOutcome.DONE
    assert np.array_equal(reader.page(1), after.content(1))
    assert (await reader.pull(old, [(2, 2)])).outcome is ReadOutcome.FAILED


async def test_a_zombie_is_not_connected_to_after_its_successor(reader: Any, start_owner: Make) -> None:
    zombie, successor = start_owner(incarnation=1), start_owner(incarnation=2)
    await reader.connect(successor)
    with pytest.raises(StaleEpoch, match="earlier epoch"):
        await reader.connect(zombie)


def open_descriptors() -> set[tuple[str, str]]:
    """(number, what it is) of all but the one that lists them."""
    numbers = os.listdir("/proc/self/fd")
    return {
        (number, os.readlink(f"/proc/self/fd/{number}"))
        for number in numbers
        if os.path.exists(f"/proc/self/fd/{number}")
    }


async def test_close_fails_what_is_under_way_and_leaves_no_thread_or_descriptor(
    kind: str, make_reader: Make, start_owner: Make
) -> None:
    stuck = start_owner()
    reader = make_reader()
    gc.collect()
    before = open_descriptors()
    await reader.open()
    peer = await reader.connect(stuck)
    stuck.freeze()
    transfers = [reader.transport.pull(peer, [PageCopy(PageId(1), PageId(page), 0)], 60.0) for page in range(6)]
    waits = [asyncio.create_task(reader.transport.wait(transfer)) for transfer in transfers]
    await asyncio.sleep(0)
    assert len(open_descriptors()) > len(before)
    await reader.transport.close()
    results = await asyncio.gather(*waits)
    if kind not in ONE_SIDED:
        assert {result.outcome for result in results} == {ReadOutcome.FAILED}
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("pages-")]
    assert open_descriptors() <= before
    late = reader.transport.pull(peer, [PageCopy(PageId(1), PageId(1), 0)], 60.0)
    assert (await reader.transport.wait(late)).outcome is ReadOutcome.FAILED


async def test_close_ends_a_connect_that_is_under_way(reader: Any, start_owner: Make) -> None:
    stuck = start_owner()
    stuck.freeze()
    connecting = asyncio.create_task(reader.transport.connect(stuck.endpoints[reader.transport.name], 60.0))
    await asyncio.sleep(0.05)
    started = time.monotonic()
    await reader.transport.close()
    with pytest.raises(PeerLost):
        await connecting
    assert time.monotonic() - started < 30.0


async def test_a_cancelled_connect_leaves_a_known_peer_alone(reader: Any, steady_owner: Any) -> None:
    peer = await reader.connect(steady_owner)
    connecting = asyncio.create_task(reader.connect(steady_owner))
    await asyncio.sleep(0)
    connecting.cancel()
    await asyncio.wait({connecting})
    assert (await reader.pull(peer, [(1, 1)])).outcome is ReadOutcome.DONE


async def test_an_owner_that_closes_lets_its_readers_go(make_reader: Make, two_in_one_process: None) -> None:
    owner, reader = make_reader(), make_reader()
    endpoint = await owner.open(worker_id="owner")
    await reader.open()
    peer = await reader.transport.connect(endpoint, 5.0)
    await owner.transport.close()
    assert (await reader.pull(peer, [(1, 1)])).outcome is ReadOutcome.FAILED
    with pytest.raises(PeerLost):
        await reader.transport.connect(endpoint, 5.0)


async def test_idle_connections_cost_no_processor_time(reader: Any, steady_owner: Any) -> None:
    await reader.connect(steady_owner)
    before = time.process_time()
    await asyncio.sleep(0.5)
    assert time.process_time() - before < 0.05
