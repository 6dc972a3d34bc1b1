"""A simulated fleet whose events are lost and whose workers and routers die: nothing is lost, indexes heal."""

from __future__ import annotations

import dataclasses

import pytest

from tests.unit.tools.simulate.fleet.fleets import BLOCK, SMALL, chats, run
from tools.simulate.fleet.results import SimulatedRun, Status, percentile, ttfts
from tools.simulate.fleet.shape import Death, Delays, Faults, RouterRestart
from tools.simulate.fleet.simulated_request import SimulatedRequest
from tools.simulate.fleet.simulation import name_of
from twostroke.base.ids import RequestId, WorkerId


def spoiled(share: float) -> Faults:
    return Faults(event_drop=share, event_duplicate=share, event_reorder=share)


@pytest.mark.parametrize("share", [0.01, 0.2])
def test_an_index_equals_its_workers_whatever_becomes_of_single_batches(share: float) -> None:
    shape = dataclasses.replace(SMALL, faults=spoiled(share), delays=Delays(event_jitter_s=0.01), routers=2)
    done = run(chats(120), shape)
    assert done.events.gaps > 0
    assert done.unequal_indexes == ()


def test_no_request_is_lost_with_its_worker() -> None:
    deaths = (
        Death(worker=WorkerId("decode-0"), at_s=3.0, back_at_s=6.0),
        Death(worker=WorkerId("prefill-1"), at_s=4.0, back_at_s=5.0),
        Death(worker=WorkerId("decode-0"), at_s=9.0),
    )
    done = run(
        chats(200, every_s=0.06), dataclasses.replace(SMALL, faults=dataclasses.replace(spoiled(0.01), deaths=deaths))
    )
    asked = chats(200, every_s=0.06).rows
    assert [outcome.status for outcome in done.outcomes] == [Status.DONE] * 200
    assert [outcome.output_tokens for outcome in done.outcomes] == [row.output_tokens for row in asked]
    assert any(outcome.attempts > 1 for outcome in done.outcomes)
    assert {use.worker: use.epochs for use in done.workers}["decode-0"] == 2
    assert done.unequal_indexes == ()


def test_requests_wait_for_a_decode_worker_to_come_back() -> None:
    deaths = tuple(Death(worker=WorkerId(f"decode-{n}"), at_s=2.0, back_at_s=4.0) for n in range(2))
    done = run(chats(60), dataclasses.replace(SMALL, faults=Faults(deaths=deaths)))
    assert [outcome.status for outcome in done.outcomes] == [Status.DONE] * 60


def test_a_router_that_starts_anew_knows_every_worker_again() -> None:
    restarts = (RouterRestart(router=0, at_s=4.0), RouterRestart(router=1, at_s=8.0))
    faults = dataclasses.replace(spoiled(0.01), router_restarts=restarts)
    done = run(chats(150), dataclasses.replace(SMALL, faults=faults, routers=2))
    assert [outcome.status for outcome in done.outcomes] == [Status.DONE] * 150
    assert done.unequal_indexes == ()
    assert done.events.snapshots >= 4


def test_a_request_that_goes_on_elsewhere_is_not_lost_again_with_the_worker_that_it_left() -> None:
    """A router starts anew between a worker's death and the moment in which it is noticed."""
    faults = Faults(
        deaths=(Death(worker=WorkerId("decode-0"), at_s=4.0),), router_restarts=(RouterRestart(router=0, at_s=4.01),)
    )
    done = run(chats(120, every_s=0.04), dataclasses.replace(SMALL, faults=faults, delays=Delays(detection_s=0.2)))
    asked = chats(120, every_s=0.04).rows
    assert [outcome.output_tokens for outcome in done.outcomes] == [row.output_tokens for row in asked]


def test_a_worker_that_is_back_before_anybody_noticed_its_death_is_known_to_all() -> None:
    deaths = (Death(worker=WorkerId("decode-0"), at_s=3.0, back_at_s=3.05),)
    done = run(chats(120, every_s=0.05), dataclasses.replace(SMALL, faults=Faults(deaths=deaths)))
    assert [outcome.status for outcome in done.outcomes] == [Status.DONE] * 120
    assert done.unequal_indexes == ()


def test_answers_that_lost_their_worker_and_then_their_router_begin_anew() -> None:
    deaths = (Death(worker=WorkerId("decode-0"), at_s=3.0, back_at_s=3.02),)
    faults = Faults(deaths=deaths, router_restarts=tuple(RouterRestart(router=0, at_s=at_s) for at_s in (3.05, 3.2)))
    asked = chats(160, every_s=0.025)
    done = run(asked, dataclasses.replace(SMALL, faults=faults))
    assert [outcome.output_tokens for outcome in done.outcomes] == [row.output_tokens for row in asked.rows]


def test_blocks_of_an_answer_are_forgotten_with_it() -> None:
    """They would be asked for without their tokens, and queues would come out negative."""
    names = [name_of(number) for number in range(3)]
    request = SimulatedRequest(
        0, RequestId("0#0"), 0.0, prompt_tokens=2 * BLOCK + 1, answer_tokens=40, block_hashes=names, emitted=30
    )
    request.longest_gap_s = 9.0
    request.forget_answer(BLOCK)
    assert (request.known_tokens, request.block_hashes) == (2 * BLOCK + 1, [name_of(0), name_of(1)])
    assert request.longest_gap_s == 0.0


def test_routers_that_hear_of_each_other_place_as_well_as_one() -> None:
    """A burst over idle workers: each router alone would send its share to the same ones."""
    bursts = chats(160, every_s=0.05)
    one = run(bursts)
    four = run(bursts, dataclasses.replace(SMALL, routers=4))
    assert [outcome.status for outcome in four.outcomes] == [Status.DONE] * 160
    assert _p90(four) < 1.25 * _p90(one)


def _p90(done: SimulatedRun) -> float:
    value = percentile(ttfts(done), 0.9)
    assert value is not None
    return value
