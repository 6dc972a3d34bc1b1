"""An answer is that of the weights which its first token came from, however it moves, or it ends with an error."""

from __future__ import annotations

import pytest

from router.serving.parent_request import AnswerWeights, weights_mark
from twostroke.base.errors import WeightsChanged
from twostroke.rpc.v1 import control_pb2

pytestmark = pytest.mark.timeout(60)
"""An answer that goes on where it must not waits for a worker that is held."""

OLD, NEW = "toy/1", "toy/2"
WAIT_S = 60.0
"""Longer than any of these tests: what is refused is refused at once, and waits for nobody."""


async def reloading(fleet, ask, *, olds: int = 1, **request):
    """An answer that has five tokens of the old weights, when new requests go to a worker with new ones."""
    workers = [await fleet.add(f"decode-{number}", hold_at=5) for number in range(olds)]
    core = await fleet.core(worker_wait_s=WAIT_S)
    core._fleet._route_to(OLD)
    answer = ask(core, tokens=60, **request)
    await answer.has(5)
    new = await fleet.add("decode-new", fingerprint=NEW)
    workers.sort(key=lambda worker: not worker.opens)
    return core, answer, *workers, new


def route_to(core, fingerprint: str) -> None:
    """The supervisor says which weights new requests go to."""
    core._fleet._route_to(fingerprint)
    core._fleet._note_change()


def has_joined(core, new) -> bool:
    worker = core._fleet.worker(new.worker_id)
    return worker is not None and worker.fingerprint == new.fingerprint and worker.reported_at_s is not None


async def test_an_answer_longer_than_the_reload_ends_with_an_error_and_no_token_of_other_weights(fleet, ask, soon):
    core, answer, old, new = await reloading(fleet, ask)
    await soon(lambda: has_joined(core, new))
    route_to(core, NEW)
    await fleet.remove(old.worker_id)
    with pytest.raises(WeightsChanged, match="begun with weights of its model that were replaced before its end"):
        await answer.task
    assert len(answer.tokens[0]) == 5
    assert not new.opens


async def test_the_last_old_worker_dies_and_its_answers_wait_until_new_requests_go_elsewhere(fleet, ask, soon):
    """With one decode worker the old weights are gone before the new ones are there."""
    core, answer, old, new = await reloading(fleet, ask)
    await fleet.remove(old.worker_id)
    await soon(lambda: has_joined(core, new))
    assert not answer.task.done()
    route_to(core, NEW)
    with pytest.raises(WeightsChanged):
        await answer.task
    assert not new.opens


async def test_an_answer_without_a_token_begins_with_the_new_weights(fleet, ask, soon):
    old = await fleet.add("decode-0", hold_at=0)
    core = await fleet.core(worker_wait_s=WAIT_S)
    core._fleet._route_to(OLD)
    answer = ask(core)
    await soon(lambda: old.opens)
    new = await fleet.add("decode-new", fingerprint=NEW)
    await soon(lambda: has_joined(core, new))
    route_to(core, NEW)
    await fleet.remove("decode-0")
    assert (await answer.task).is_right
    assert len(new.opens) == 1


@pytest.mark.parametrize("leaves", ["drain", "death"])
async def test_an_answer_goes_on_at_another_worker_that_has_its_weights_yet(fleet, ask, soon, leaves):
    core, answer, old, other, new = await reloading(fleet, ask, olds=2)
    await soon(lambda: has_joined(core, new))
    route_to(core, NEW)
    other.hold_at = None
    if leaves == "drain":
        old.load.state = control_pb2.WORKER_STATE_DRAINING
    else:
        await fleet.remove(old.worker_id)
    assert (await answer.task).is_right
    assert len(other.opens) == 1
    assert {fetch.fingerprint for fetch in other.fetches} == ({OLD} if leaves == "drain" else set())
    assert not new.opens


async def test_what_drains_alone_with_its_weights_keeps_its_answers_until_the_deadline(fleet, ask, soon, statuses):
    core, answer, old, new = await reloading(fleet, ask)
    await soon(lambda: has_joined(core, new))
    route_to(core, NEW)
    old.load.state = control_pb2.WORKER_STATE_DRAINING
    await soon(lambda: core._fleet.worker("decode-0").is_draining)
    old.hold_at = None
    assert (await answer.task).is_right
    assert not new.opens
    assert not new.fetches


async def test_all_choices_of_a_request_have_the_weights_of_its_first_token(fleet, ask, soon):
    """The second choice waits at a worker without a token while new weights come; that worker dies."""
    await fleet.add("decode-0", hold_at=5)
    core = await fleet.core(worker_wait_s=WAIT_S)
    core._fleet._route_to(OLD)
    answer = ask(core, tokens=60, n=2)
    await answer.has(5, 0)
    new = await fleet.add("decode-new", fingerprint=NEW)
    await soon(lambda: has_joined(core, new))
    route_to(core, NEW)
    await fleet.remove("decode-0")
    with pytest.raises(WeightsChanged):
        await answer.task
    assert not new.opens


async def test_a_choice_whose_first_token_comes_from_other_weights_is_computed_again_with_the_first_ones(
    fleet, ask, soon
):
    first = await fleet.add("decode-0", hold_at=0)
    core = await fleet.core(worker_wait_s=WAIT_S)
    core._fleet._route_to(OLD)
    weights = AnswerWeights()
    early = ask(core, request_id="early", weights=weights)
    await soon(lambda: first.opens)
    new = await fleet.add("decode-new", fingerprint=NEW, hold_at=0)
    await soon(lambda: has_joined(core, new))
    route_to(core, NEW)
    late = ask(core, request_id="late", weights=weights)
    await soon(lambda: new.opens)
    first.hold_at = None
    assert (await early.task).is_right
    new.hold_at = None
    assert (await late.task).is_right
    assert [opened.request_id for opened in first.opens] == ["early#0", "late#0"]
    assert weights.mark == weights_mark(OLD, b"")


@pytest.mark.parametrize("has_worker", [False, True])
async def test_a_stream_whose_client_has_tokens_of_weights_that_are_gone_is_not_resumed(fleet, ask, has_worker):
    if has_worker:
        await fleet.add("decode-0", fingerprint=NEW)
    else:
        await fleet.add("decode-0", fingerprint="toy/3")
    core = await fleet.core(worker_wait_s=WAIT_S)
    weights = AnswerWeights(weights_mark(OLD, b""))
    with pytest.raises(WeightsChanged):
        await ask(core, resumptions=1, weights=weights).task
    assert not fleet.workers["decode-0"].opens


async def test_what_a_worker_has_of_a_stream_by_other_weights_than_the_clients_is_not_resumed(fleet, ask):
    worker = await fleet.add("decode-0", hold_at=5)
    core = await fleet.core(worker_wait_s=WAIT_S)
    earlier = ask(core)
    await earlier.has(5)
    with pytest.raises(WeightsChanged):
        await ask(core, resumptions=1, weights=AnswerWeights(weights_mark(NEW, b""))).task
    assert len(worker.opens) == 1


async def test_a_resumed_stream_waits_for_the_worker_that_returns_with_its_weights(fleet, ask, soon):
    worker = await fleet.add("decode-0", hold_at=5)
    core = await fleet.core(worker_wait_s=WAIT_S)
    await worker.kill()
    await fleet.remove("decode-0")
    resumed = ask(core, resumptions=1, weights=AnswerWeights(weights_mark(OLD, b"")))
    worker.hold_at = None
    await worker.begin(2)
    fleet.show()
    assert (await resumed.task).is_right


@pytest.mark.parametrize(
    ("fingerprint", "own"),
    [(NEW, b""), (OLD, b"one"), (OLD, b"other"), ("", b"")],
)
def test_weights_are_the_fingerprint_and_the_adapters_bytes(fingerprint: str, own: bytes) -> None:
    weights = AnswerWeights()
    assert weights.fix(OLD, b"")
    assert not weights.fix(fingerprint, own)
    assert not weights.admit(fingerprint, own)
    with_adapter = AnswerWeights()
    assert with_adapter.fix(OLD, b"one")
    assert with_adapter.admit(OLD, b"one")
    assert not with_adapter.admit(OLD, b"other")
    assert not with_adapter.admit(OLD, b"")
