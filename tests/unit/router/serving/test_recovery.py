"""An answer outlives token streams and decode workers."""

from __future__ import annotations

import asyncio

import pytest

from twostroke.base.errors import (
    InternalError,
    PeerLost,
    TransferFailed,
)
from twostroke.kv_cache.block import block_hashes_of
from twostroke.rpc.v1 import worker_pb2


async def test_an_answer_goes_on_elsewhere_when_its_decode_worker_dies(fleet, ask, soon, sampled):
    first, second = await fleet.add("decode-0", hold_at=30), await fleet.add("decode-1", hold_at=30)
    core = await fleet.core()
    answer = ask(core, tokens=60, salt=b"mine", public_blocks=6)
    await answer.has(30)
    dying, other = (first, second) if first.opens else (second, first)
    other.hold_at = None
    await dying.kill()
    await answer.task
    assert answer.is_right
    again = other.opens[0]
    assert len(again.emitted) == 30
    assert again.attempt == 1
    assert again.block_hashes == b"".join(block_hashes_of([*range(100), *answer.tokens[0][:30]], 16, b"mine", 6))
    assert (again.request.salt, again.request.public_blocks) == (b"mine", 6)
    assert sampled(core, "reopened_requests_total") == 1


@pytest.mark.parametrize("is_dead_first", [True, False])
async def test_a_worker_that_the_supervisor_no_longer_lists_is_owed_nothing(fleet, ask, statuses, soon, is_dead_first):
    first, second = await fleet.add("decode-0", hold_at=30), await fleet.add("decode-1", hold_at=30)
    core = await fleet.core()
    answer = ask(core, tokens=60)
    await answer.has(30)
    dying, other = (first, second) if first.opens else (second, first)
    other.hold_at = None
    if is_dead_first:
        await dying.kill()
        await answer.task
        await soon(lambda: dying.worker_id in core._with.links._unclosed)
    await fleet.remove(dying.worker_id)
    await soon(lambda: dying.worker_id not in statuses(core))
    await answer.task
    assert not core._with.links._unclosed


async def test_an_answer_waits_for_the_only_decode_worker_to_come_back(fleet, ask, statuses, soon):
    worker = await fleet.add("decode-0", hold_at=10)
    core = await fleet.core()
    answer = ask(core, tokens=40)
    await answer.has(10)
    await worker.kill()
    await soon(lambda: statuses(core) == {"decode-0": "dead"})
    worker.hold_at = None
    await worker.begin(2)
    fleet.show()
    await answer.task
    assert answer.is_right
    assert worker.opens[-1].worker_epoch == str(worker.epoch)


async def test_an_answer_survives_death_after_death_as_long_as_it_gets_on(fleet, ask):
    worker = await fleet.add("decode-0", hold_at=0)
    core = await fleet.core()
    answer = ask(core, tokens=40)
    for incarnation in range(2, 9):
        worker.hold_at = 3 * (incarnation - 1)
        await answer.has(worker.hold_at)
        await worker.kill()
        await worker.begin(incarnation)
        fleet.show()
    worker.hold_at = None
    await answer.task
    assert answer.is_right


async def test_a_request_that_its_workers_never_survive_is_given_up(fleet, ask):
    worker = await fleet.add("decode-0", fail_answers=TransferFailed("again"))
    core = await fleet.core()
    with pytest.raises(InternalError, match="workers were lost in a row: again"):
        await ask(core).task
    assert 2 <= len(worker.opens) <= 10


async def test_without_a_decode_worker_in_time_the_request_fails_as_peer_lost(fleet, ask):
    worker = await fleet.add("decode-0")
    core = await fleet.core(worker_wait_s=0.3)
    del fleet.entries["decode-0"]
    await worker.kill()
    fleet.show()
    with pytest.raises(PeerLost, match="no decode worker"):
        await ask(core).task


async def test_a_broken_token_stream_is_attached_again_without_gap_or_duplicate(fleet, ask, sampled):
    worker = await fleet.add("decode-0", step_s=0.002)
    core = await fleet.core()
    answers = [ask(core, tokens=200, request_id=f"r{number}", prompt=range(number, 50)) for number in range(3)]
    for seen in (20, 60, 100):
        await answers[0].has(seen)
        await worker.break_tokens()
    for answer in answers:
        assert (await answer.task).is_right
    assert len(worker.opens) == 3
    assert len(worker.attached) >= 3
    assert sampled(core, "reopened_requests_total") == 0


async def test_an_answer_that_ended_while_the_stream_was_broken_still_ends_right(fleet, ask, soon):
    worker = await fleet.add("decode-0", hold_at=5)
    core = await fleet.core()
    answer = ask(core, tokens=12)
    await answer.has(5)
    await worker.break_tokens()
    worker.hold_at = None
    await answer.task
    assert answer.is_right


async def test_an_answer_the_worker_has_dropped_meanwhile_is_opened_again(fleet, ask):
    worker = await fleet.add("decode-0", hold_at=5)
    core = await fleet.core()
    answer = ask(core, tokens=12)
    await answer.has(5)
    worker.answers.clear()
    worker.hold_at = None
    await worker.break_tokens()
    await answer.task
    assert answer.is_right
    assert [opened.attempt for opened in worker.opens] == [0, 1]


async def test_tokens_of_older_attempts_and_of_nobody_are_ignored(fleet, ask, soon, sampled):
    worker = await fleet.add("decode-0", hold_at=5)
    core = await fleet.core()
    answer = ask(core, tokens=12)
    await answer.has(5)
    worker.fail_answers = TransferFailed("later")
    worker.hold_at = None
    await soon(lambda: len(worker.opens) > 1)
    worker.hold_at, worker.fail_answers = 5, None
    opened = worker.opens[-1]
    for stale in (("r#0", 0), ("r#0", opened.attempt + 7), ("x#0", 0)):
        entry = worker_pb2.TokenEntry(request_id=stale[0], attempt=stale[1], position=5, tokens=[{"id": 4999}])
        worker.streams[core.router_id].put_nowait(worker_pb2.TokenBatch(entries=[entry]))
    worker.hold_at = None
    await answer.task
    assert answer.is_right
    assert sampled(core, "stale_token_entries_total") >= 3


async def test_a_gap_in_the_stream_is_filled_before_anything_is_passed_on(fleet, ask):
    worker = await fleet.add("decode-0", hold_at=5)
    core = await fleet.core()
    answer = ask(core, tokens=30)
    await answer.has(5)
    worker.answers["r#0", 0].is_attached = False
    worker.hold_at = 12
    while len(worker.answers["r#0", 0].tokens) < 12:
        await asyncio.sleep(0.005)
    worker.answers["r#0", 0].is_attached = True
    worker.hold_at = None
    await answer.task
    assert answer.is_right
    assert worker.attached[0] == ("r#0", 5)


async def test_another_life_behind_the_same_address_is_not_mistaken_for_the_one_that_died(fleet, ask, sampled, soon):
    worker = await fleet.add("decode-0", hold_at=10)
    core = await fleet.core()
    answer = ask(core, tokens=20)
    await answer.has(10)
    port = int(worker.address.rpartition(":")[2])
    await worker.kill()
    await worker.begin(2, port)
    await soon(lambda: sampled(core, "stale_epochs_refused_total") >= 2)
    assert worker.streams == {}
    fleet.show()
    worker.hold_at = None
    assert (await answer.task).is_right
    assert worker.attached == []


async def test_an_answer_lost_between_its_opening_and_a_new_token_stream_is_opened_again(fleet, ask, soon):
    worker = await fleet.add("decode-0")
    core = await fleet.core()
    await ask(core, tokens=1, request_id="first").task
    worker.may_open.clear()
    answer = ask(core)
    await soon(lambda: len(worker.opens) == 2)
    link, _ = core._with.links._links["decode-0"]
    before = link._connections
    await worker.break_tokens()
    await soon(lambda: link._connections > before)
    worker.forgets = 1
    worker.may_open.set()
    assert (await answer.task).is_right
    assert len(worker.opens) == 3
