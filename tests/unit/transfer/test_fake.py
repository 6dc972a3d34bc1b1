"""The faults that a test can order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from tests.trials.chaos.injection.fake_transport import (
    Delay,
    Expire,
    Fail,
    FakeTransport,
    Fault,
    FaultPlan,
    FlipByte,
    WriteLate,
)
from twostroke.base.errors import PeerLost
from twostroke.base.ids import Epoch, PageId
from twostroke.kv_cache.memory import PageMemory
from twostroke.transfer.base import Identity, PageCopy, ReadOutcome, digest
from twostroke.transfer.same_host.shm import ShmTransport

COPIES = [PageCopy(PageId(1), PageId(2), 0), PageCopy(PageId(2), PageId(3), 0)]


class Pair:
    """An owner, and a reader through a fake."""

    def __init__(self) -> None:
        self.owner, self.fake = ShmTransport(), FakeTransport(ShmTransport())
        self.remote, self.local = PageMemory(4, 100), PageMemory(4, 100)
        self.remote.data[:] = np.arange(5, dtype=np.uint8)[:, None] + 1

    async def open(self) -> None:
        self.endpoint = await self.owner.open(self.remote, Identity("owner", Epoch(1, 1), "fingerprint", ""))
        await self.fake.open(self.local, Identity("reader", Epoch(1, 2), "fingerprint", ""))
        self.peer = await self.fake.connect(self.endpoint, 5.0)

    def begin(self, fault: Fault | None, deadline_s: float = 5.0) -> Any:
        self.fake.plan = FaultPlan({0: fault} if fault else {})
        return self.fake.pull(self.peer, COPIES, deadline_s)

    async def close(self) -> None:
        await self.fake.close()
        await self.owner.close()
        self.local.close()
        self.remote.close()


@pytest.fixture
async def pair(_no_thread_is_left: None) -> AsyncIterator[Pair]:
    ready = Pair()
    await ready.open()
    yield ready
    await ready.close()


async def test_without_a_plan_it_is_the_transport_that_it_wraps(pair: Pair) -> None:
    assert pair.fake.name == "shm"
    assert (await pair.fake.wait(pair.begin(None))).outcome is ReadOutcome.DONE
    assert (pair.local.data[2] == 2).all()


async def test_the_kth_transfer_fails(pair: Pair) -> None:
    pair.fake.plan = FaultPlan({1: Fail("link down")})
    results = [await pair.fake.wait(pair.fake.pull(pair.peer, COPIES, 5.0)) for _ in range(3)]
    assert [result.outcome for result in results] == [ReadOutcome.DONE, ReadOutcome.FAILED, ReadOutcome.DONE]
    assert results[1].reason == "link down"


async def test_every_transfer_can_fail(pair: Pair) -> None:
    pair.fake.plan = FaultPlan(every_transfer=Fail())
    results = [await pair.fake.wait(pair.fake.pull(pair.peer, COPIES, 5.0)) for _ in range(3)]
    assert {result.outcome for result in results} == {ReadOutcome.FAILED}
    assert not pair.local.data.any()


async def test_a_delay_is_waited_for_and_a_long_one_expires(pair: Pair) -> None:
    assert (await pair.fake.wait(pair.begin(Delay(0.01)))).outcome is ReadOutcome.DONE
    assert (await pair.fake.wait(pair.begin(Delay(30.0), deadline_s=0.05))).outcome is ReadOutcome.EXPIRED


async def test_an_expired_transfer_copied_nothing(pair: Pair) -> None:
    transfer = pair.begin(Expire(), deadline_s=0.05)
    assert (await pair.fake.wait(transfer)).outcome is ReadOutcome.EXPIRED
    await pair.fake.fence(transfer)
    assert not pair.local.data.any()


async def test_a_fence_wakes_whoever_waits_for_a_hanging_transfer(pair: Pair) -> None:
    transfer = pair.begin(Expire(), deadline_s=60.0)
    waiting = asyncio.create_task(pair.fake.wait(transfer))
    await asyncio.sleep(0)
    await pair.fake.fence(transfer)
    assert (await waiting).outcome is ReadOutcome.FAILED


async def test_a_flipped_byte_is_done_but_its_digest_does_not_match(pair: Pair) -> None:
    assert (await pair.fake.wait(pair.begin(FlipByte(copy=1, offset=17)))).outcome is ReadOutcome.DONE
    assert digest(pair.local.page(PageId(2))) == digest(pair.remote.page(PageId(1)))
    assert digest(pair.local.page(PageId(3))) != digest(pair.remote.page(PageId(2)))
    assert np.flatnonzero(pair.local.data[3] != 3).tolist() == [17]


async def test_a_late_writer_writes_until_it_is_fenced(pair: Pair) -> None:
    transfer = pair.begin(WriteLate(), deadline_s=0.02)
    assert (await pair.fake.wait(transfer)).outcome is ReadOutcome.EXPIRED
    seen = pair.local.data.copy()
    await asyncio.sleep(0.02)
    assert not np.array_equal(pair.local.data[[2, 3]], seen[[2, 3]])
    assert not pair.local.data[[0, 1, 4]].any()
    await pair.fake.fence(transfer)
    fenced = pair.local.data.copy()
    await asyncio.sleep(0.02)
    assert np.array_equal(pair.local.data, fenced)


async def test_the_kth_connect_is_lost(pair: Pair) -> None:
    pair.fake.plan = FaultPlan(lost_connects=frozenset({0}))
    with pytest.raises(PeerLost, match="injected"):
        await pair.fake.connect(pair.endpoint, 5.0)
    assert await pair.fake.connect(pair.endpoint, 5.0) is pair.peer
