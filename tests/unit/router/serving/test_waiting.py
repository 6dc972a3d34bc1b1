"""Requests that wait in a live router: workers say that they have hours of work, and then that they have none."""

from __future__ import annotations

import asyncio
import time

import pytest

from router.routing.selector import RoutingParams
from router.serving.parent_request import ParentRequest
from tests.unit.router.serving.asking import Ask
from twostroke.base.errors import Overloaded
from twostroke.request import GenerateRequest, SamplingParams
from twostroke.rpc.v1 import control_pb2

COSTS = control_pb2.StepCosts(step_s=0.001, prompt_token_s=1e-4, step_tokens=128, step_target_s=0.02)
BUSY_S = 3600.0


def load(queued_s: float) -> control_pb2.Load:
    return control_pb2.Load(pages_free=500, pages_total=500, queued_s=queued_s, costs=COSTS, prefill_busy_s=1.0)


def asking(core, request_id: str, *, tokens: int = 5, priority: int = 0, tenant: str = "", deadline_s=None) -> Ask:
    sampling = SamplingParams(seed=1, max_tokens=tokens)
    request = GenerateRequest(prompt=tuple(range(100)), sampling=sampling, deadline_s=deadline_s)
    routing = RoutingParams(priority=priority, tenant=tenant)
    return Ask(core, ParentRequest(request_id=request_id, request=request, routing=routing))


def held(core) -> float:
    return core._metrics.registry.get_sample_value("twostroke_queued_requests", {"role": "router"}) or 0.0


async def busy_core(fleet, soon, **settings):
    """A core that has heard its only worker say that it is busy."""
    worker = await fleet.add("decode-0", load=load(BUSY_S))
    core = await fleet.core(**settings)
    await soon(lambda: core._fleet.workers[0].load.queued_s == BUSY_S)
    return core, worker


async def test_held_requests_go_in_order_of_class_when_their_worker_has_time(fleet, soon, sampled):
    core, worker = await busy_core(fleet, soon)
    answers = [asking(core, f"r{priority}", priority=priority) for priority in (0, 2, 1)]
    await soon(lambda: held(core) == 3)
    await asyncio.sleep(0.1)
    assert worker.opens == []
    worker.load = load(0.0)
    for answer in answers:
        assert (await answer.task).is_right
    assert [opened.request_id for opened in worker.opens] == ["r2#0", "r1#0", "r0#0"]
    assert held(core) == 0
    assert sampled(core, "queue_seconds_count") == 3
    assert len(core._routing.reservations) == 0


async def test_a_held_request_whose_client_leaves_is_forgotten(fleet, soon):
    core, worker = await busy_core(fleet, soon)
    gone, stays = asking(core, "gone"), asking(core, "stays")
    await soon(lambda: held(core) == 2)
    gone.task.cancel()
    await asyncio.wait([gone.task])
    assert held(core) == 1
    worker.load = load(0.0)
    assert (await stays.task).is_right
    assert [opened.request_id for opened in worker.opens] == ["stays#0"]
    assert len(core._routing.reservations) == 0


async def test_a_client_that_leaves_in_the_moment_of_its_release_leaves_nothing(fleet, soon):
    core, worker = await busy_core(fleet, soon)
    answers = [asking(core, f"r{number}") for number in range(8)]
    await soon(lambda: held(core) == 8)
    released = core._with.placer.queue._waiting["r0#0"]
    released.add_done_callback(lambda _: [answer.task.cancel() for answer in answers])
    worker.load = load(0.0)
    await asyncio.wait([answer.task for answer in answers])
    await soon(lambda: held(core) == 0 and len(core._routing.reservations) == 0)
    assert not core._with.placer.queue._waiting
    assert (await asking(core, "after").task).is_right


async def test_a_predicted_miss_is_refused_at_once_and_says_when_to_come_back(fleet, soon, sampled):
    core, worker = await busy_core(fleet, soon, slo_ttft_s=2.0)
    with pytest.raises(Overloaded, match=r"predicted in 3\d+\.\d\d s, .* later than --slo-ttft allows") as raised:
        await asking(core, "r").task
    assert raised.value.retry_after_s == pytest.approx(BUSY_S - 2, rel=0.01)
    assert worker.opens == []
    assert sampled(core, "refusals_total", reason="slo") == 1
    assert len(core._routing.reservations) == 0


async def test_a_clients_deadline_is_a_limit_too(fleet, soon, sampled):
    core, _ = await busy_core(fleet, soon)
    with pytest.raises(Overloaded, match="the request's deadline allows"):
        await asking(core, "r", deadline_s=time.time() + 30).task
    assert sampled(core, "refusals_total", reason="deadline") == 1


async def test_a_refusal_that_was_wrong_is_counted(fleet, soon, sampled):
    core, worker = await busy_core(fleet, soon, slo_ttft_s=60.0)
    with pytest.raises(Overloaded):
        await asking(core, "r").task
    worker.load = load(0.0)
    await soon(lambda: sampled(core, "false_refusals_total") == 1)
    assert sampled(core, "followed_refusals_total") == 1


async def test_no_more_wait_than_may(fleet, soon, sampled):
    core, worker = await busy_core(fleet, soon, max_queued_requests=2)
    waiting = [asking(core, f"r{number}") for number in range(2)]
    await soon(lambda: held(core) == 2)
    with pytest.raises(Overloaded, match="too many requests wait"):
        await asking(core, "third").task
    other = asking(core, "other", tenant="other")  # its tenant waits for nothing yet: the flood makes room
    with pytest.raises(Overloaded, match="too many requests wait"):
        await waiting[1].task
    worker.load = load(0.0)
    assert (await waiting[0].task).is_right
    assert (await other.task).is_right
    assert sampled(core, "refusals_total", reason="queue_full") == 2


async def test_held_requests_wait_for_a_worker_that_is_gone_to_come_back(fleet, soon):
    core, worker = await busy_core(fleet, soon, worker_wait_s=2.0)
    answer = asking(core, "r")
    await soon(lambda: held(core) == 1)
    await asyncio.sleep(2.1)  # as long as it has a worker, it does not wait for one
    await fleet.remove("decode-0")
    await soon(lambda: held(core) == 0)
    assert not answer.task.done()
    await fleet.add("decode-1")
    assert (await answer.task).is_right
    assert worker.opens == []


async def test_a_router_that_closes_lets_nobody_wait(fleet, soon):
    core, _ = await busy_core(fleet, soon)
    answer = asking(core, "r")
    await soon(lambda: held(core) == 1)
    await core.close()
    with pytest.raises(Exception, match="shutting down"):
        await answer.task


async def test_one_that_lost_its_worker_before_its_first_token_does_not_wait_again(fleet, soon, statuses):
    first = await fleet.add("decode-0", load=load(0.0), hold_at=0)
    core = await fleet.core(slo_ttft_s=60.0)
    answer = asking(core, "r")
    await soon(lambda: len(first.opens) == 1)
    await fleet.add("decode-1", load=load(BUSY_S))
    await soon(lambda: statuses(core).get("decode-1") == "serving")
    await first.kill()
    assert (await answer.task).is_right
