"""What an answer says that it found in caches never falls: the router keeps the highest number that it was told."""

from __future__ import annotations

import asyncio

from tests.unit.decode_worker.request_states import an_answer
from tests.unit.worker.supply.test_supply import Silent
from twostroke.kv_cache.pool import BlockPool
from twostroke.worker.supply.pull_spec import PullReport
from twostroke.worker.supply.supply import Supply


async def test_blocks_of_an_open_pull_are_not_cached_until_its_report_says_so() -> None:
    answer = an_answer(prompt=160)
    answer.counts_computed = True
    answer.sequence.hit_blocks = 2
    pull: asyncio.Future[PullReport] = asyncio.get_running_loop().create_future()
    answer.supply = Supply(answer.sequence, BlockPool(1, Silent()), (), (), answer, lambda sequence, depth: [])
    answer.supply.pulling(0, pull)
    assert answer.cached_tokens == 32
    pull.set_result(PullReport(pulled=8, computed=5))
    await asyncio.sleep(0)
    assert answer.cached_tokens == 80
