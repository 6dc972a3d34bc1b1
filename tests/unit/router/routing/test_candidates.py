"""A decision sees the holders, the least loaded and a few drawn of a large fleet, and all of a small one."""

from __future__ import annotations

import random

import pytest

from router.fleet.worker import Shape, Worker
from router.routing.candidates import BY_QUEUE, BY_STREAMS, COMPARED_HOLDERS, LEAST_LOADED, WHOLE, Candidates, Need
from router.routing.policies import policy_named
from router.routing.prefix_index import PrefixIndex
from router.routing.reservations import Reservations, ReservedShare
from router.routing.selector import Selector, Workers
from tests.unit.router.queued import queued_request
from twostroke.base.ids import Epoch, RequestId, WorkerId
from twostroke.config import Role
from twostroke.rpc.v1.control_pb2 import WORKER_STATE_SERVING, Load, StepCosts

MANY = 200
COSTS = StepCosts(prompt_token_s=1e-3)

REQUEST = queued_request("r", 160, most_new=50)


class Room:
    """A role's workers, and what is placed on them."""

    def __init__(self, count: int = MANY, seed: int = 0) -> None:
        self.draws = random.Random(seed)
        self.reservations = Reservations()
        self.candidates = Candidates((BY_QUEUE, BY_STREAMS), self.reservations, seed)
        self.workers = [
            Worker(WorkerId(f"w-{number:03}"), Role.DECODE, "", Epoch(1, 1), WORKER_STATE_SERVING)
            for number in range(count)
        ]
        self.now_s = 0.0
        for worker in self.workers:
            self.report(worker)

    def report(self, worker: Worker, **load: float) -> None:
        drawn: dict[str, float] = {"queued_s": self.draws.expovariate(1.0), "running": self.draws.randrange(40)}
        worker.report(Load(costs=COSTS, **(drawn | load)), self.now_s)  # type: ignore[arg-type]

    def place(self, worker: Worker, seconds: float = 1.0) -> None:
        request = RequestId(f"r{self.draws.random()}")
        self.reservations.place(request, {worker.worker_id: ReservedShare(1, seconds, 1, 1)}, ())

    def queue_s(self, worker: Worker) -> float:
        return worker.queue_s(self.now_s) + self.reservations.seconds_on(worker.worker_id)

    def streams(self, worker: Worker) -> int:
        return worker.load.running + self.reservations.requests_on(worker.worker_id)

    def among(self, held: dict[WorkerId, int] | None = None, workers: list[Worker] | None = None) -> set[WorkerId]:
        depths = {worker: (depth,) for worker, depth in (held or {}).items()}
        need = Need(tokens=1600, block_size=16, held=depths, queue_s=self.queue_s)
        given = self.workers if workers is None else workers
        chosen = self.candidates.among(given, {worker.worker_id: worker for worker in self.workers}, need)
        names = [worker.worker_id for worker in chosen]
        assert len(names) == len(set(names))
        return set(names)


def test_a_small_fleet_is_taken_whole() -> None:
    room = Room(WHOLE)
    room.now_s = 1.0
    room.workers[0].report(Load(costs=COSTS, prefill_busy_s=1.0), 1.0)
    selector = Selector(policy_named("kv"), PrefixIndex(), room.reservations, seed=1, narrows=True)
    shape = Shape(block_size=16, page_bytes=1000)
    seen = selector.snapshot(REQUEST, Workers(shape, room.workers, room.workers), 1.0)
    assert [view.worker for view in seen.decode] == [worker.worker_id for worker in room.workers]
    assert seen.prefill_utilisation == pytest.approx(room.workers[0].utilisation / WHOLE)


@pytest.mark.parametrize("seed", range(5))
def test_the_least_loaded_are_found_whatever_was_placed_and_reported_since(seed: int) -> None:
    room = Room(seed=seed)
    for _ in range(60):
        room.now_s += 0.05
        for worker in room.draws.sample(room.workers, 5):
            room.report(worker)
        room.place(room.draws.choice(sorted(room.workers, key=room.queue_s)[:30]))
        names = room.among()
        assert len(names) < WHOLE
        chosen = [worker for worker in room.workers if worker.worker_id in names]
        for load in (room.queue_s, room.streams):
            assert sorted(map(load, chosen))[:LEAST_LOADED] == sorted(map(load, room.workers))[:LEAST_LOADED]


def test_a_burst_upon_an_idle_fleet_finds_workers_without_placements() -> None:
    room = Room()
    for worker in room.workers:
        room.report(worker, queued_s=0.0, running=0)
    for _ in range(LEAST_LOADED * 8):
        chosen = [worker for worker in room.workers if worker.worker_id in room.among()]
        idle = min(chosen, key=room.queue_s)
        assert room.queue_s(idle) == 0.0
        room.place(idle)


def test_holders_are_candidates_the_deepest_even_when_they_are_busy() -> None:
    room = Room()
    names = [worker.worker_id for worker in room.workers]
    busiest, warm = room.workers[7], room.workers[9]
    room.report(busiest, queued_s=500.0, running=40)
    room.report(warm, queued_s=2.0, running=40)
    shared = {name: 1 for name in names if name not in (busiest.worker_id, warm.worker_id)}
    chosen = room.among(shared | {warm.worker_id: 60, busiest.worker_id: 90})
    assert {busiest.worker_id, warm.worker_id} <= chosen
    assert len(shared) > COMPARED_HOLDERS


def test_a_worker_that_is_gone_is_not_chosen_and_may_come_back() -> None:
    room = Room()
    idle = room.workers[3]
    room.report(idle, queued_s=0.0, running=0)
    assert idle.worker_id in room.among()
    assert idle.worker_id not in room.among(workers=[worker for worker in room.workers if worker is not idle])
    assert idle.worker_id in room.among()


def test_the_policy_sees_the_candidates_and_ranks_as_it_would_rank_all() -> None:
    room = Room()
    for worker in room.workers:
        room.report(worker, queued_s=5.0, running=20)
    idle = room.workers[123]
    room.report(idle, queued_s=0.0, running=0)
    workers = Workers(Shape(block_size=16, page_bytes=1000), room.workers, ())
    seen: dict[bool, int] = {}
    for narrows in (False, True):
        selector = Selector(policy_named("kv"), PrefixIndex(), room.reservations, seed=1, narrows=narrows)
        seen[narrows] = len(selector.snapshot(REQUEST, workers, 0.0).decode)
        assert selector.select(REQUEST, workers, 0.0).decode == idle.worker_id
        room.reservations.end(REQUEST.request_id)
    assert seen[False] == MANY
    assert seen[True] < WHOLE


def test_the_mean_utilisation_is_that_of_all_workers() -> None:
    room = Room()
    room.now_s = 1.0
    for worker in room.workers[: MANY // 2]:
        worker.report(Load(costs=COSTS, prefill_busy_s=1.0), 1.0)
    room.among()
    expected = sum(worker.utilisation for worker in room.workers) / MANY
    assert room.candidates.utilisation == pytest.approx(expected)
    assert expected > 0
