"""How connections share the loop: none parses for long at a stretch, and those that are gone take no turn."""

from __future__ import annotations

import asyncio
import time

import pytest

from router.http_server.loop_share import SLICE_S, LoopShare


async def test_other_work_comes_between_pieces_and_all_are_parsed() -> None:
    share, left, between = LoopShare(), dict.fromkeys("abc", 40), 0

    def step(name: str) -> bool:
        time.sleep(SLICE_S)
        left[name] -= 1
        return left[name] > 0

    for name in left:
        share.run(lambda name=name: step(name))  # type: ignore[misc]  # of a loop that has ended by then
    while any(left.values()):
        most, least = max(left.values()), min(left.values())
        assert most - least <= 1, "they take turns"
        between += 1
        await asyncio.sleep(0)
    assert between >= 100


async def test_a_connection_that_is_gone_takes_no_turn() -> None:
    share, has_read = LoopShare(), asyncio.Event()
    for _ in range(10_000):
        share.drain(lambda: False)

    def read() -> bool:
        has_read.set()
        return True

    share.drain(read)
    async with asyncio.timeout(60):
        await has_read.wait()


@pytest.mark.parametrize("is_drain", [False, True])
async def test_a_step_that_fails_keeps_no_other_connection_waiting(is_drain: bool) -> None:
    share, failures, has_run = LoopShare(), [], asyncio.Event()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context["exception"]))

    def fail() -> bool:
        raise RuntimeError("a bug")

    def run() -> bool:
        has_run.set()
        return False

    ask = share.drain if is_drain else share.run
    ask(fail)
    ask(run)
    async with asyncio.timeout(60):
        await has_run.wait()
    assert len(failures) == 1
