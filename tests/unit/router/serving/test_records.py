"""What a router writes into its request log of answers that real (if fake) workers gave."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.unit.router.serving.asking import eventually
from tests.unit.router.serving.conftest import BLOCK
from tools.simulate.traces.formats import record_of
from twostroke.base.errors import ServeError
from twostroke.observability.request_log import AnswerRecord, WorkerRecord


def records(path) -> tuple[list[AnswerRecord], list[WorkerRecord]]:
    told = [record_of(line, "log") for line in path.read_text().splitlines()]
    return [r for r in told if isinstance(r, AnswerRecord)], [r for r in told if isinstance(r, WorkerRecord)]


async def test_answers_and_workers_are_written_down(fleet, ask, tmp_path):
    await fleet.add("prefill-0", "prefill")
    await fleet.add("decode-0")
    path = tmp_path / "log.jsonl"
    core = await fleet.core(request_log=str(path))
    await ask(core, request_id="first").task
    await ask(core, request_id="second").task
    await core.close()
    answers, workers = records(path)
    assert [answer.request_id for answer in answers] == ["first#0", "second#0"]
    first, second = answers
    assert first.block_hashes == second.block_hashes
    assert len(first.block_hashes) == 100 // BLOCK
    assert (second.outcome, second.output_tokens, second.attempts, second.decode) == ("length", 20, 1, "decode-0")
    assert (second.drafted_tokens, second.kept_tokens) == ({"lookup": 5}, {"lookup": 3})
    assert (second.cached_tokens, second.predicted_cached_tokens) == (96, 96)
    assert second.forecast["cached_blocks"] == 6
    assert second.predicted_ttft_s == pytest.approx(
        sum(second.forecast[term] for term in ("prefill_s", "transfer_s", "tail_s"))
        + max(second.forecast[term] for term in ("queue_s", "fetch_s", "admission_s"))
    )
    assert 0 < second.ttft_s <= second.instants["first_token"] - second.instants["received"]
    assert second.itl_mean_s <= second.itl_max_s
    assert {worker.worker for worker in workers} == {"prefill-0", "decode-0"}, "at the end, if not before"
    assert {(worker.pages_total, worker.block_size, worker.status) for worker in workers} == {(500, BLOCK, "serving")}


async def test_an_answer_that_failed_or_was_given_up_is_written_down_with_its_outcome(fleet, ask, soon, tmp_path):
    worker = await fleet.add("decode-0")
    path = tmp_path / "log.jsonl"
    core = await fleet.core(request_log=str(path))
    worker.hold_at = 5
    left = ask(core, request_id="left")
    await left.has(5)
    left.task.cancel()
    await asyncio.gather(left.task, return_exceptions=True)
    late = ask(core, request_id="late", deadline_s=1.0)
    with pytest.raises(ServeError):
        await late.task
    await core.close()
    answers, _ = records(path)
    outcomes = {answer.request_id: (answer.outcome, answer.output_tokens, answer.decode) for answer in answers}
    assert outcomes == {"left#0": ("cancelled", 5, "decode-0"), "late#0": ("DeadlineExceeded", 0, None)}


async def test_a_wall_clock_that_is_set_back_makes_no_time_negative(fleet, ask, tmp_path, monkeypatch):
    worker = await fleet.add("decode-0", hold_at=0)
    path = tmp_path / "log.jsonl"
    core = await fleet.core(request_log=str(path))
    answer = ask(core)
    await eventually(lambda: worker.opens)
    wall_s = time.time()
    monkeypatch.setattr(time, "time", lambda: wall_s - 3600)
    worker.hold_at = None
    await answer.task
    await core.close()
    (record,), _ = records(path)
    assert record.ttft_s > 0
    assert record.itl_max_s > 0


async def test_an_answer_that_moved_says_so(fleet, ask, tmp_path):
    first, second = await fleet.add("decode-0", hold_at=5), await fleet.add("decode-1", hold_at=5)
    path = tmp_path / "log.jsonl"
    core = await fleet.core(request_log=str(path))
    moved = ask(core, request_id="moved")
    await moved.has(5)
    holder, other = (first, second) if first.opens else (second, first)
    other.hold_at = None
    await holder.kill()
    await fleet.remove(holder.worker_id)
    await moved.task
    await core.close()
    (answer,), _ = records(path)
    assert (answer.attempts, answer.output_tokens, answer.outcome) == (2, 20, "length")
    assert answer.decode == other.worker_id
    assert answer.ttft_s is not None, "the first attempt had answered"
