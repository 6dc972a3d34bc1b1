"""Dispatch against real gRPC workers that fail: what is tried again, and what its client is told."""

from __future__ import annotations

import asyncio

import pytest

from router.serving.choice_state import MAX_LOSSES, MOST_FAILED_STEPS, MOST_LOST_ENGINES, _Losses
from twostroke.base.errors import (
    Draining,
    EngineLost,
    InternalError,
    PeerLost,
    ServeError,
    StepFailed,
)


async def test_a_core_that_fails_says_so_and_its_clients_are_told(fleet, ask, monkeypatch):
    await fleet.add("decode-0", hold_at=5)
    core = await fleet.core()
    answer = ask(core)
    await answer.has(5)

    def break_down(view, tasks):
        raise RuntimeError("a bug")

    monkeypatch.setattr(core._fleet, "_take", break_down)
    fleet.show()
    async with asyncio.timeout(60):
        with pytest.raises(ExceptionGroup, match="TaskGroup"):
            await core.ended()
        with pytest.raises(Draining):
            await answer.task
    assert core.is_draining


async def test_a_bug_while_closing_an_answer_costs_no_other_one(fleet, ask, soon, monkeypatch):
    worker = await fleet.add("decode-0", hold_at=5)
    core = await fleet.core()
    other, leaving = ask(core, request_id="other"), ask(core, request_id="leaving")
    await other.has(5)
    await leaving.has(5)
    closes = []

    async def close(link, stream):
        closes.append(stream.request_id)
        raise RuntimeError("a bug")

    monkeypatch.setattr("router.fleet.worker_link.WorkerLink.close", close)
    leaving.task.cancel()
    await soon(lambda: closes == ["leaving#0"])
    worker.hold_at = None
    async with asyncio.timeout(60):
        assert (await other.task).is_right


async def test_every_choice_of_a_prompt_is_held_against_its_own_prediction(fleet, ask, sampled):
    await fleet.add("decode-0")
    core = await fleet.core()
    await ask(core).task
    answer = await ask(core, n=3).task
    assert {finish.cached_tokens for finish in answer.finishes.values()} == {6 * 16}
    assert sampled(core, "predicted_reused_blocks_total") == 3 * 6
    assert sampled(core, "reused_blocks_total") == 3 * 6


async def test_a_request_that_a_worker_cannot_compute_goes_on_at_another_one(fleet, ask, sampled):
    broken = await fleet.add("decode-0")
    broken.fail_answers = StepFailed("no such row")
    core = await fleet.core()
    healthy = await fleet.add("decode-1")
    while len(core.operations.loads()) < 2:
        await asyncio.sleep(0.01)
    answers = [await ask(core, request_id=f"r{number}", prompt=[number] * 40).task for number in range(6)]
    assert all(answer.is_right for answer in answers)
    assert len(healthy.opens) == 6
    assert len(broken.opens) == sampled(core, "reopened_requests_total")


async def test_a_request_that_two_workers_cannot_compute_is_nobodys_third_failure(fleet, ask):
    workers = [await fleet.add(f"decode-{number}") for number in range(3)]
    for worker in workers:
        worker.fail_answers = StepFailed("no such row")
    with pytest.raises(InternalError, match="2 attempts failed alike: no such row"):
        await ask(await fleet.core()).task
    assert sorted(len(worker.opens) for worker in workers) == [0, 1, 1]


@pytest.mark.parametrize(
    ("error", "most"), [(StepFailed("no such row"), MOST_FAILED_STEPS), (EngineLost("gone"), MOST_LOST_ENGINES)]
)
def test_failures_with_tokens_between_them_are_not_the_requests(error: ServeError, most: int) -> None:
    losses = _Losses()
    for _ in range(3 * most):
        losses.add(error, has_new_tokens=True)
    for _ in range(most - 2):
        losses.add(error, has_new_tokens=False)
    with pytest.raises(InternalError):
        losses.add(error, has_new_tokens=False)


async def test_a_request_beside_which_three_engines_fail_is_tried_no_more(fleet, ask):
    workers = [await fleet.add(f"decode-{number}") for number in range(4)]
    for worker in workers:
        worker.fail_answers = EngineLost("the device failed: illegal address")
    with pytest.raises(InternalError, match="3 workers lost their engines: the device failed"):
        await ask(await fleet.core()).task
    assert sum(len(worker.opens) for worker in workers) == 3


async def test_a_request_that_loses_too_many_workers_in_a_row_ends_with_an_error_that_says_not_to_retry(fleet, ask):
    workers = [await fleet.add(f"decode-{number}") for number in range(2)]
    for worker in workers:
        worker.fail_answers = PeerLost("its process has ended")
    with pytest.raises(InternalError, match="6 workers were lost in a row: its process has ended") as caught:
        await ask(await fleet.core()).task
    assert not caught.value.retryable
    assert sum(len(worker.opens) for worker in workers) == MAX_LOSSES + 1
