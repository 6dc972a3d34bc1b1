"""What an answer says that it found in caches never falls: the router keeps the highest number that it was told."""

from __future__ import annotations

import asyncio

from tests.unit.decode_worker.request_states import an_answer
from twostroke.worker.pulls.pull_spec import PullReport


async def test_blocks_of_an_open_pull_are_not_cached_until_its_report_says_so() -> None:
    answer = an_answer(prompt=160)
    answer.has_windows = True
    answer.sequence.hit_blocks = 2
    pull: asyncio.Future[PullReport] = asyncio.get_running_loop().create_future()
    answer.pulls.add(pull)
    assert answer.cached_tokens == 32
    answer.pulled(PullReport(pulled=8, computed=5))
    answer.pulls.remove(pull)
    assert answer.cached_tokens == 80
