"""A simulated router's brain: index, reservations, selector and policy, the very objects of the live router.

What the live router's shells do around them (router.feed, router.placement) is done here without waiting.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router import selector
from router.member import Member, Standing
from router.policies import policy_named
from router.policy import Policy
from router.prefix_index import Applied, PrefixIndex
from router.reservations import Batch, Reservations, Watch
from router.selector import Selector, Shape
from twostroke.config import Role
from twostroke.ids import Epoch, RequestId, RouterId, WorkerId
from twostroke.kv_cache.events import EventBatch
from twostroke.rpc.v1.control_pb2 import WORKER_STATE_SERVING, Load, ModelInfo
from twostroke.simulate.brain import Ask, Brain, BrainCounts, Placement, Refusal
from twostroke.simulate.fleet import FleetShape


@dataclass(frozen=True, slots=True)
class Brains:
    """Makes one for each router."""

    policy: str
    new_policy: Callable[[], Policy]

    def __call__(self, shape: FleetShape, router: int) -> Brain:
        return LiveBrain(self.new_policy(), shape, seed=shape.seed * 1000 + router)


def brains_named(policy: str) -> Brains:
    """Raises ConfigError, listing what there is."""
    policy_named(policy)
    return Brains(policy, lambda: policy_named(policy))


@dataclass(frozen=True, slots=True)
class _News:
    """From one router to another."""

    batch: Batch
    is_whole: bool
    """The first of a stream: nothing else is open."""


class LiveBrain:
    def __init__(self, policy: Policy, shape: FleetShape, seed: int) -> None:
        self._index = PrefixIndex()
        self._reservations = Reservations()
        self._selector = Selector(policy, self._index, self._reservations, seed=seed)
        self._shape = Shape(block_size=shape.block_size, page_bytes=shape.page_bytes)
        self._watches: dict[str, Watch] = {}
        """What other routers have been told."""
        self._members: dict[WorkerId, Member] = {}
        self._waiting: dict[RequestId, Ask] = {}
        """Nobody could take them yet."""
        self._due: list[Placement | Refusal] = []
        self._decisions = self._gaps = self._snapshots = self._divergences = 0
        self._decision_cpu_s = 0.0

    def joined(self, worker: WorkerId, role: Role, epoch: Epoch) -> None:
        member = Member(worker, role, str(worker), epoch, WORKER_STATE_SERVING)
        member.model = ModelInfo()
        self._members[worker] = member

    def heard(self, worker: WorkerId, epoch: Epoch, batch: EventBatch, load: Load, now_s: float) -> bool:
        member = self._members.get(worker)
        if member is None or member.epoch != epoch:
            return True
        self._reservations.reported(worker, now_s)
        member.report(load, now_s)
        was_serving, member.is_live = member.is_live, True
        verdict = self._index.apply(worker, epoch, batch)
        self._snapshots += verdict is Applied.APPLIED and batch.snapshot
        self._gaps += verdict is Applied.GAP
        self._divergences += verdict is Applied.DIVERGED
        if not was_serving:
            self._look_again(now_s)
        return verdict in (Applied.APPLIED, Applied.OLD)

    def next_sequence(self, worker: WorkerId, epoch: Epoch) -> int | None:
        return self._index.next_sequence(worker, epoch)

    def left(self, worker: WorkerId, now_s: float) -> None:
        self._members.pop(worker, None)
        self._index.forget(worker)

    def place(self, ask: Ask, now_s: float) -> None:
        decode, prefill = self._serving(Role.DECODE), self._serving(Role.PREFILL)
        free = [member for member in decode if member.worker not in ask.without]
        if free:
            self._due.append(self._decide(ask, free, prefill, now_s))
        elif decode:
            self._due.append(Refusal(request_id=ask.request_id, retry_after_s=None))
        else:
            self._waiting[ask.request_id] = ask

    def due(self, now_s: float) -> Sequence[Placement | Refusal]:
        due, self._due = self._due, []
        return due

    def wake_s(self) -> float | None:
        return None

    def opened(self, request_id: RequestId, now_s: float) -> None:
        self._reservations.opened(request_id, now_s)

    def first_token(self, request_id: RequestId, now_s: float) -> None:
        self._reservations.end(request_id)

    def ended(self, request_id: RequestId, answer_tokens: int | None, now_s: float) -> None:
        self._reservations.end(request_id)
        self._waiting.pop(request_id, None)
        if answer_tokens is not None:
            self._selector.answered(answer_tokens)

    def news(self, router: str) -> object | None:
        watch = self._watches.get(router)
        is_first = watch is None
        if watch is None:
            watch = self._watches[router] = self._reservations.watch(lambda: None)
        batch = self._reservations.take(watch)
        return _News(batch, is_first) if batch or is_first else None

    def heard_router(self, router: str, news: object, now_s: float) -> None:
        assert isinstance(news, _News)
        self._reservations.apply(RouterId(router), news.batch, now_s, whole=news.is_whole)

    def left_router(self, router: str, now_s: float) -> None:
        self._reservations.lost(RouterId(router), now_s)
        watch = self._watches.pop(router, None)
        if watch is not None:
            self._reservations.unwatch(watch)

    def blocks(self, worker: WorkerId) -> EventBatch | None:
        return self._index.snapshot(worker)

    def counts(self) -> BrainCounts:
        return BrainCounts(
            reservations=len(self._reservations),
            decisions=self._decisions,
            decision_cpu_s=self._decision_cpu_s,
            gaps=self._gaps,
            snapshots=self._snapshots,
            divergences=self._divergences,
        )

    def _serving(self, role: Role) -> list[Member]:
        return [m for m in self._members.values() if m.role is role and m.standing is Standing.SERVING]

    def _look_again(self, now_s: float) -> None:
        waiting, self._waiting = self._waiting, {}
        for ask in waiting.values():
            self.place(ask, now_s)

    def _decide(self, ask: Ask, decode: Sequence[Member], prefill: Sequence[Member], now_s: float) -> Placement:
        begun_s = time.process_time()
        wanted = selector.Ask(
            request_id=ask.request_id,
            known_tokens=ask.known_tokens,
            names=ask.names,
            most_answer_tokens=ask.most_answer_tokens,
        )
        decision = self._selector.select(wanted, self._shape, decode, prefill, now_s)
        self._decisions += 1
        self._decision_cpu_s += time.process_time() - begun_s
        return Placement(
            request_id=ask.request_id,
            decode=decision.decode,
            source=decision.source,
            peer=decision.peer,
            peer_blocks=decision.peer_blocks,
            decided_s=now_s,
            first_token_s=decision.forecast.first_token_s,
            cached_blocks=decision.forecast.cached_blocks,
        )
