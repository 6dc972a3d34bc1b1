"""Answers leave a decode worker that drains, after their pages."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from twostroke.base.errors import Draining, Overloaded
from twostroke.kv_cache.block import block_hashes_of, root_hash
from twostroke.rpc.convert import hashes_to_bytes
from twostroke.rpc.v1 import control_pb2


def drain(worker) -> None:
    worker.load.state = control_pb2.WORKER_STATE_DRAINING


async def begun(fleet, ask, worker_wait_s=60.0, **options):
    """An answer that has five of its tokens; the worker that has it, and another one."""
    first, second = await fleet.add("decode-0", hold_at=5), await fleet.add("decode-1", hold_at=5)
    core = await fleet.core(worker_wait_s=worker_wait_s)
    answer = ask(core, **options)
    await answer.has(5)
    return core, answer, *((first, second) if first.opens else (second, first))


async def test_tokens_flow_until_the_pages_are_there_and_then_the_answer_goes_on_elsewhere(fleet, ask, soon, sampled):
    core, answer, leaving, other = await begun(fleet, ask, tokens=60)
    other.may_fetch.clear()
    other.hold_at = None
    drain(leaving)
    await soon(lambda: other.fetches)
    leaving.hold_at = 30
    await answer.has(30)
    assert not other.opens
    other.may_fetch.set()
    assert (await answer.task).is_right
    first, *later = other.fetches
    assert (first.source.worker_id, first.source.epoch) == (leaving.worker_id, str(leaving.epoch))
    assert (first.worker_epoch, first.root) == (str(other.epoch), root_hash())
    assert first.block_hashes == hashes_to_bytes(block_hashes_of(range(100), 16))
    assert [len(fetch.block_hashes) // 16 for fetch in later] == [(100 + 30) // 16], (
        "what was filled meanwhile comes too"
    )
    (opened,) = other.opens
    assert len(opened.emitted) == 30
    assert not opened.HasField("source")
    await soon(lambda: leaving.closed == [("r#0", 0)])
    assert sampled(core, "migrated_requests_total") == 1
    assert sampled(core, "reopened_requests_total") == 0


async def test_without_another_decode_worker_answers_stay_until_there_is_one(fleet, ask, statuses, soon):
    leaving = await fleet.add("decode-0", hold_at=5)
    core = await fleet.core()
    answers = [ask(core, request_id=f"r{number}") for number in range(2)]
    for answer in answers:
        await answer.has(5)
    drain(leaving)
    await soon(lambda: statuses(core) == {"decode-0": "draining"})
    leaving.hold_at = 10
    await answers[0].has(10)
    other = await fleet.add("decode-1")
    for answer in answers:
        assert (await answer.task).is_right
    assert len(leaving.opens) == len(other.opens) == 2
    assert (await ask(core, request_id="new").task).is_right
    assert len(leaving.opens) == 2, "it gets nothing new"


async def test_an_answer_without_a_token_is_opened_again_without_its_pages(fleet, ask, soon):
    first, second = await fleet.add("decode-0", hold_at=0), await fleet.add("decode-1", hold_at=0)
    core = await fleet.core()
    answer = ask(core)
    await soon(lambda: first.opens or second.opens)
    leaving, other = (first, second) if first.opens else (second, first)
    other.hold_at = None
    drain(leaving)
    assert (await answer.task).is_right
    assert not other.fetches


async def test_whoever_cannot_fetch_the_pages_costs_the_answer_nothing_but_time(fleet, ask, soon):
    _, answer, leaving, other = await begun(fleet, ask)
    other.refusal = Overloaded("full")
    leaving.hold_at = 12
    drain(leaving)
    await soon(lambda: other.opens)
    other.refusal = other.hold_at = leaving.hold_at = None
    third = await fleet.add("decode-2")
    assert (await answer.task).is_right
    assert third.opens or len(other.opens) > 1


async def test_an_answer_whose_target_dies_on_the_way_stays_where_it_is_until_there_is_another(
    fleet, ask, statuses, soon, sampled
):
    core, answer, leaving, other = await begun(fleet, ask, worker_wait_s=0.2)
    other.may_fetch.clear()
    drain(leaving)
    await soon(lambda: other.fetches)
    await other.kill()
    await soon(lambda: statuses(core)[other.worker_id] == "dead")
    leaving.hold_at = 12
    await answer.has(12)
    third = await fleet.add("decode-2")
    assert (await answer.task).is_right
    assert third.opens[0].emitted, "it moved after all"
    assert sampled(core, "migrated_requests_total") == 1


async def test_while_the_only_decode_worker_begins_a_new_epoch_requests_wait_and_are_not_refused(
    fleet, ask, statuses, soon
):
    leaving = await fleet.add("decode-0")
    core = await fleet.core()
    fleet.entries["decode-0"].state = control_pb2.WORKER_STATE_DRAINING
    fleet.show()
    await soon(lambda: statuses(core) == {"decode-0": "draining"})
    with pytest.raises(Draining):
        await ask(core).task
    fleet.entries["decode-0"].returns = True
    fleet.show()
    await soon(lambda: not core._fleet.is_leaving)
    answer = ask(core)
    await leaving.kill()
    await leaving.begin(2)
    fleet.show()
    assert (await answer.task).is_right


async def test_nobody_asks_what_is_known_of_an_answer_while_it_has_nowhere_to_go(fleet, ask, statuses, soon):
    """It takes its time with a long prompt, and the fleet changes often."""
    leaving = await fleet.add("decode-0", hold_at=5)
    core = await fleet.core()
    answer = ask(core)
    await answer.has(5)
    (watched,) = core._with.migration._watched
    watched.attempt = Mock()
    drain(leaving)
    await soon(lambda: statuses(core) == {"decode-0": "draining"})
    core._fleet._note_change()
    watched.attempt.assert_not_called()
    leaving.hold_at = None
    assert (await answer.task).is_right


async def test_a_stream_that_begins_on_a_worker_that_drains_already_moves_at_once(fleet, ask):
    """The worker was chosen before it said that it drains, and the fleet does not change after that."""
    core, answer, leaving, other = await begun(fleet, ask)
    migration = core._with.migration
    (before,) = migration._watched
    other.hold_at = None
    drain(leaving)
    assert (await answer.task).is_right
    with migration.watching(before.stream, Mock(), before.parent):
        (watched,) = migration._watched
        assert watched.task is not None
