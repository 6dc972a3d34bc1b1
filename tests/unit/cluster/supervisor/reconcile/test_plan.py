"""The supervisor's decisions: every stage, every pair of stages, crash loops, nodes that shall be left."""

from __future__ import annotations

import itertools
import math

import pytest

from cluster.supervisor.reconcile.plan import (
    LONGEST_BACKOFF_S,
    LONGEST_LEAVE_S,
    NEAR_S,
    NEXT,
    SPARE_S,
    STABLE_S,
    Create,
    Observed,
    PlacedWorker,
    Plan,
    Start,
    WorkerStage,
    backoff_s,
    leaves,
    plan,
)
from twostroke.config import Role

NOW_S = 100.0


def at(stage: WorkerStage, *, since_s: float = NOW_S, crashes: int = 0, has_served: bool = False) -> Observed:
    return Observed("decode-0", stage, since_s, crashes, has_served)


def test_a_worker_without_an_actor_is_created() -> None:
    assert plan([at(WorkerStage.ABSENT)], NOW_S) == Plan((Create("decode-0"),))


def test_a_created_worker_is_started() -> None:
    assert plan([at(WorkerStage.IDLE)], NOW_S) == Plan((Start("decode-0"),))


@pytest.mark.parametrize(
    "stage", [WorkerStage.STARTING, WorkerStage.SERVING, WorkerStage.DRAINING, WorkerStage.DRAINED, WorkerStage.FAILED]
)
def test_nothing_is_done_to_a_worker_that_lives_or_never_will(stage: WorkerStage) -> None:
    assert plan([at(stage)], NOW_S) == Plan()


def test_a_worker_that_died_once_is_started_at_once() -> None:
    assert plan([at(WorkerStage.DEAD, crashes=1)], NOW_S) == Plan((Start("decode-0"),))


def test_a_worker_that_dies_young_again_waits_and_the_plan_says_until_when() -> None:
    dead = at(WorkerStage.DEAD, crashes=3)
    due_s = NOW_S + backoff_s(3)
    assert plan([dead], NOW_S) == Plan((), wake_at_s=due_s)
    assert plan([dead], due_s) == Plan((Start("decode-0"),))


def test_the_plan_wakes_for_the_first_of_several_dead_workers() -> None:
    workers = [at(WorkerStage.DEAD, crashes=5), at(WorkerStage.DEAD, crashes=2), at(WorkerStage.SERVING)]
    assert plan(workers, NOW_S).wake_at_s == NOW_S + backoff_s(2)


def test_pauses_double_up_to_the_longest() -> None:
    pauses_s = [backoff_s(crashes) for crashes in range(1, 40)]
    assert pauses_s[:4] == [0.0, 0.5, 1.0, 2.0]
    assert pauses_s == sorted(pauses_s)
    assert pauses_s[-1] == LONGEST_BACKOFF_S


def test_a_crash_after_a_long_service_is_the_first_of_a_new_count() -> None:
    serving = at(WorkerStage.SERVING, crashes=4, has_served=True)
    assert serving.end(NOW_S + STABLE_S - 0.1, misconfigured=False).crashes == 5
    ended = serving.end(NOW_S + STABLE_S, misconfigured=False)
    assert (ended.crashes, ended.crashed_s) == (1, NOW_S + STABLE_S)


def test_a_wrong_configuration_is_final_only_for_a_worker_that_never_served() -> None:
    assert at(WorkerStage.STARTING).end(NOW_S, misconfigured=True).stage is WorkerStage.FAILED
    assert at(WorkerStage.STARTING, has_served=True).end(NOW_S, misconfigured=True).stage is WorkerStage.DEAD


def test_a_worker_that_once_served_is_known_to_have() -> None:
    starting = at(WorkerStage.STARTING)
    assert not starting.has_served
    assert starting.enter(WorkerStage.SERVING, NOW_S).has_served
    assert starting.enter(WorkerStage.SERVING, NOW_S).end(NOW_S, misconfigured=False).has_served


@pytest.mark.parametrize(("before", "after"), list(itertools.product(WorkerStage, WorkerStage)))
def test_only_the_transitions_of_the_table_are_possible(before: WorkerStage, after: WorkerStage) -> None:
    if after in NEXT[before]:
        entered = at(before, since_s=0.0).enter(after, NOW_S)
        assert (entered.stage, entered.since_s) == (after, NOW_S)
    else:
        with pytest.raises(AssertionError):
            at(before).enter(after, NOW_S)


def test_following_the_plan_leads_every_stage_back_to_a_life_but_those_that_are_left_to_others() -> None:
    for stage in set(WorkerStage) - {
        WorkerStage.FAILED,
        WorkerStage.DRAINING,
        WorkerStage.ASLEEP,
        WorkerStage.DRAINED,
    }:
        worker, now_s = at(stage, crashes=7), NOW_S
        for _ in range(5):
            if worker.stage in (WorkerStage.STARTING, WorkerStage.SERVING):
                break
            step = plan([worker], now_s)
            if step.wake_at_s is not None:
                now_s = step.wake_at_s
            for action in step.actions:
                worker = worker.enter(WorkerStage.IDLE if isinstance(action, Create) else WorkerStage.STARTING, now_s)
        assert worker.stage in (WorkerStage.STARTING, WorkerStage.SERVING), stage


# Nodes that shall be left


def placed(worker_id: str, stage: WorkerStage = WorkerStage.SERVING, node_id: str | None = "leaving") -> PlacedWorker:
    return PlacedWorker(worker_id, Role(worker_id.partition("-")[0]), stage, node_id)


def leavers(workers: list[PlacedWorker], left_s: float, *, has_others: bool = True) -> list[str]:
    return [leave.worker_id for leave in leaves(workers, {"leaving": left_s}, has_others=has_others)]


BOTH = [placed("prefill-0"), placed("decode-0"), placed("decode-1")]
FAR_S = NEAR_S + 1.0


@pytest.mark.parametrize("left_s", [FAR_S, math.inf])
def test_a_node_with_time_is_left_by_one_of_each_role_and_by_the_next_once_all_others_serve(left_s: float) -> None:
    assert leavers(BOTH, left_s) == ["prefill-0", "decode-0"]
    for stage in set(WorkerStage) - {
        WorkerStage.SERVING,
        WorkerStage.ASLEEP,
        WorkerStage.DRAINED,
        WorkerStage.FAILED,
    }:
        moving = [placed("decode-0", stage), placed("decode-1")]
        assert leavers(moving, left_s) == [], f"nobody of the role would be left, or there is no room: {stage}"
    assert leavers([placed("decode-0", node_id="other"), placed("decode-1")], left_s) == ["decode-1"]


@pytest.mark.parametrize("stage", [WorkerStage.DRAINED, WorkerStage.FAILED])
def test_nobody_waits_for_a_worker_that_does_not_come_back(stage: WorkerStage) -> None:
    assert leavers([placed("decode-0", stage), placed("decode-1")], FAR_S) == ["decode-1"]


def test_a_node_whose_end_is_near_is_left_by_all_at_once_whoever_is_away_and_wherever_they_will_go() -> None:
    away = placed("decode-2", WorkerStage.STARTING, None)
    assert leavers([*BOTH, away], NEAR_S, has_others=False) == ["prefill-0", "decode-0", "decode-1"]


def test_without_another_node_workers_stay_until_the_end_is_near() -> None:
    assert leavers(BOTH, FAR_S, has_others=False) == []


def test_a_drain_ends_before_its_node_and_is_never_longer_than_the_longest() -> None:
    def deadline_s(left_s: float) -> float:
        (leave,) = leaves([placed("decode-0")], {"leaving": left_s}, has_others=True)
        return leave.deadline_s

    assert deadline_s(math.inf) == deadline_s(FAR_S) == LONGEST_LEAVE_S
    assert deadline_s(10.0) == 10.0 - SPARE_S
    assert deadline_s(1.0) == deadline_s(-5.0) == 0.0, "its time is over, and it is still there"
