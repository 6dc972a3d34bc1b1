"""What a worker that is gone held is taken out of the index between requests, not in one turn of the event loop."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from router.metrics import RouterMetrics
from router.routing import routing_state
from router.routing.prefix_index import SWEEP_BLOCKS
from router.routing.routing_state import RoutingState
from twostroke.base.ids import Epoch, WorkerId
from twostroke.kv_cache.block import block_hashes_of
from twostroke.kv_cache.events import EventLog
from twostroke.rpc.events import batch_to_message
from twostroke.rpc.membership import Membership

A = WorkerId("a")
EPOCH, LATER = Epoch(1, 7), Epoch(2, 3)
BLOCKS = 3 * SWEEP_BLOCKS + 100


def take_snapshot(state: RoutingState, epoch: Epoch, blocks: int) -> None:
    log = EventLog(epoch)
    for block_hash in block_hashes_of(range(blocks), 1):
        log.stored(block_hash)
    log.publish()
    assert state.apply(A, epoch, batch_to_message(A, epoch, log.snapshot()))


@pytest.mark.parametrize("comes_back", [False, True])
async def test_the_index_is_swept_in_several_turns_of_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    monkeypatch.setattr(routing_state, "SWEEP_PAUSE_S", 0.0)
    state = RoutingState("router-0", Membership("", None), RouterMetrics())
    take_snapshot(state, EPOCH, BLOCKS)
    if comes_back:
        take_snapshot(state, LATER, 0)
    else:
        state.forget(A)
    sizes = [len(state.index)]
    async with asyncio.timeout(60):
        while state.index.has_gone:
            await asyncio.sleep(0)
            sizes.append(len(state.index))
    assert sizes[-1] == 0
    assert max(before - after for before, after in itertools.pairwise(sizes)) == SWEEP_BLOCKS
