"""Router replicas that decide one burst together: what they tell each other keeps them from all choosing one worker."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.fleet.worker import Shape, Worker
from router.routing.policies import policy_named
from router.routing.prefix_index import PrefixIndex
from router.routing.reservations import Reservations
from router.routing.selector import Selector, Workers
from tests.unit.router.queued import queued_request
from twostroke.base.ids import BlockHash, Epoch, RouterId, WorkerId
from twostroke.config import Role
from twostroke.rpc.v1 import control_pb2

BLOCK = 16
SHAPE = Shape(block_size=BLOCK, page_bytes=1 << 16)
EXCHANGE_S = 0.002
BETWEEN_S = 0.001
"""From one request of the burst to the next, over all routers."""
COSTS = control_pb2.StepCosts(step_s=0.02, stream_s=0.0003, prompt_token_s=0.001, step_tokens=512, step_target_s=0.1)


def worker(role: Role, index: int) -> Worker:
    result = Worker(WorkerId(f"{role}-{index}"), role, f"h:{index}", Epoch(1, index), control_pb2.WORKER_STATE_SERVING)
    result.report(control_pb2.Load(pages_free=10_000, pages_total=10_000, costs=COSTS), 0.0)
    return result


class Replica:
    def __init__(self, index: int, workers: Sequence[Worker]) -> None:
        self.name = RouterId(f"router-{index}")
        self.reservations = Reservations()
        self._workers = workers
        self._selector = Selector(policy_named("kv"), PrefixIndex(), self.reservations, seed=index)

    def place(self, request_id: str, tokens: int, now_s: float) -> tuple[WorkerId, float]:
        """Returns who computes the prompt, and for how long."""
        hashes = tuple(BlockHash(random.Random(f"{request_id}.{n}").randbytes(16)) for n in range(tokens // BLOCK))
        request = queued_request(request_id, tokens, hashes, arrived_s=now_s)
        decode = [result for result in self._workers if result.role is Role.DECODE]
        prefill = [result for result in self._workers if result.role is Role.PREFILL]
        decision = self._selector.select(request, Workers(SHAPE, decode, prefill), now_s)
        return decision.source or decision.decode, decision.forecast.prefill_s


def waited_s(replica_count: int, *, exchange_s: float | None, seed: int) -> float:
    """Returns the seconds waited by a burst of 64 prompts, of all lengths, over 8 idle prefill workers and 8 decode
    workers."""
    draws = random.Random(seed)
    workers = [worker(role, index) for role in (Role.PREFILL, Role.DECODE) for index in range(8)]
    replicas = [Replica(index, workers) for index in range(replica_count)]
    watches = [(a, b, a.reservations.watch(lambda: None)) for a in replicas for b in replicas if a is not b]
    queues_s: dict[WorkerId, float] = {}
    waited_s, exchanged_s = 0.0, 0.0
    for number in range(64):
        now_s = number * BETWEEN_S
        if exchange_s is not None and now_s >= exchanged_s + exchange_s:
            exchanged_s = now_s
            for source, target, watch in watches:
                target.reservations.apply(source.name, source.reservations.take(watch), now_s)
        tokens, turn = round(64 * 2 ** (5 * draws.random())), draws.randrange(1 << 16)
        chosen, seconds = replicas[turn % replica_count].place(f"r{number}", tokens, now_s)
        waited_s += queues_s.get(chosen, 0.0)
        queues_s[chosen] = queues_s.get(chosen, 0.0) + seconds
    return waited_s


def over_bursts(replica_count: int, exchange_s: float | None) -> float:
    return sum(waited_s(replica_count, exchange_s=exchange_s, seed=seed) for seed in range(6))


def test_four_routers_that_tell_each_other_spread_a_burst_like_one_and_those_that_do_not_herd() -> None:
    one = over_bursts(1, None)
    assert over_bursts(4, EXCHANGE_S) < 1.10 * one
    assert over_bursts(4, None) > 1.3 * one
