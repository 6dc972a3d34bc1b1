"""A simulated router: takes requests in, gives them to decode workers as its brain says, and follows every worker.

What the live router does over rpc (`router.serving`) takes a delay here; all decisions are the brain's.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tools.simulate.fleet.event_queue import Agenda
from tools.simulate.fleet.feed import Counts, Feed, Listener
from tools.simulate.fleet.host import Host
from tools.simulate.fleet.results import Outcome, Status
from tools.simulate.fleet.routing_adapter import Ask, Brain, Placement
from tools.simulate.fleet.shape import FleetShape
from tools.simulate.fleet.simulated_request import Journey
from tools.simulate.fleet.steps import TOKEN
from tools.simulate.fleet.worker_lifecycle import Lives
from twostroke.errors import Overloaded
from twostroke.ids import WorkerId
from twostroke.kv_cache.block import name_block, root_name
from twostroke.kv_cache.events import EventBatch
from twostroke.rpc.v1.control_pb2 import Load

COALESCE_S = 0.002
"""Reservations go out to other routers this often at most."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all routers share."""

    agenda: Agenda
    shape: FleetShape
    lives: Lives
    counts: Counts
    over: Callable[[Outcome], None]


class Door:
    def __init__(self, number: int, brain: Brain, around: Surroundings) -> None:
        self.name = f"router-{number}"
        self.brain = brain
        self.others: list[Door] = []
        self._around = around
        self._agenda = around.agenda
        self._shape = around.shape
        self._draws = random.Random(f"{around.shape.seed} {self.name} events")
        self._feeds: dict[WorkerId, Feed] = {}
        self._open: dict[Journey, frozenset[WorkerId]] = {}
        """With the workers that have refused each."""
        self._by_id: dict[str, Journey] = {}
        self._wake_s: float | None = None
        self._is_telling = False

    # Workers

    def join(self, host: Host) -> None:
        """The supervisor lists this life of a worker."""
        brain, worker, epoch = self.brain, host.worker, host.epoch
        self._close_feed(worker)
        brain.joined(worker, host.role, epoch)

        def hear(batch: EventBatch, load: Load) -> bool:
            follows_on = brain.heard(worker, epoch, batch, load, self._agenda.now_s)
            self._drain()
            return follows_on

        listener = Listener(hear, lambda: brain.next_sequence(worker, epoch))
        self._feeds[worker] = Feed(host, listener, self._draws, self._around.counts)

    def leave(self, host: Host) -> None:
        """This life of a worker is over; one that has begun since is not."""
        if self._around.lives.host(host.worker) is not host:
            return
        self._close_feed(host.worker)
        self.brain.left(host.worker, self._agenda.now_s)
        self._drain()

    def lost(self, journey: Journey, attempt: int) -> None:
        """That attempt's decode worker died: it goes on elsewhere, from the last token that was sent."""
        if journey in self._open and journey.attempts == attempt:
            journey.was_lost = journey.was_lost or journey.first_token_s is None
            self._again(journey)

    # Requests

    def take(self, journey: Journey) -> None:
        self._open[journey] = frozenset()
        self._by_id[journey.request_id] = journey
        self._place(journey)

    def began(self, journey: Journey) -> None:
        self._agenda.after(self._shape.delays.token_s, lambda: self._first_token(journey))

    def answered(self, journey: Journey) -> None:
        self._agenda.after(self._shape.delays.token_s, lambda: self._end(journey, Status.DONE))

    def restart(self, brain: Brain) -> list[Journey]:
        """Forget everything; returns the requests that were open, whose clients have to ask again."""
        lost = list(self._open)
        for journey in lost:
            if journey.placement is not None:
                self._around.lives.answers(journey.placement.decode).drop(journey)
            journey.forget_answer(self._shape.block_size)
        self._open.clear()
        self._by_id.clear()
        self.brain = brain
        self._wake_s = None
        for feed in self._feeds.values():
            feed.close()
        for host in self._around.lives.listed:
            self.join(host)
        for other in self.others:
            other.brain.left_router(self.name, self._agenda.now_s)
        return lost

    # What other routers say

    def hear_router(self, name: str, news: object) -> None:
        self.brain.heard_router(name, news, self._agenda.now_s)

    # Below: placing

    def _place(self, journey: Journey) -> None:
        self._name_blocks(journey)
        ask = Ask(
            request_id=journey.request_id,
            arrived_s=journey.arrived_s,
            known_tokens=journey.known_tokens,
            names=tuple(journey.names),
            most_answer_tokens=journey.answer_tokens - journey.emitted,
            tenant=journey.tenant,
            priority=journey.priority,
            has_had_turn=journey.placement is not None,
            without=self._open[journey],
        )
        self.brain.place(ask, self._agenda.now_s)
        self._drain()

    def _drain(self) -> None:
        """Do what the brain has decided."""
        brain, now_s = self.brain, self._agenda.now_s
        for decided in brain.due(now_s):
            journey = self._by_id[decided.request_id]
            if isinstance(decided, Placement):
                self._send(journey, decided)
            else:
                self._end(journey, Status.REFUSED, decided.retry_after_s)
        wake_s = brain.wake_s()
        if wake_s is not None and (self._wake_s is None or wake_s < self._wake_s):
            self._wake_s = wake_s
            self._agenda.at(wake_s, self._woken)
        self._tell()

    def _woken(self) -> None:
        self._wake_s = None
        self._drain()

    def _send(self, journey: Journey, placement: Placement) -> None:
        journey.placement = placement
        journey.attempts += 1
        if journey.predicted_cached_tokens is None:
            journey.predicted_cached_tokens = placement.cached_blocks * self._shape.block_size
        attempt, open_s = journey.attempts, self._shape.delays.open_s

        def reach() -> None:
            if journey in self._open and journey.attempts == attempt:
                self._reach(journey, placement, attempt)

        self._agenda.after(open_s, reach)

    def _reach(self, journey: Journey, placement: Placement, attempt: int) -> None:
        lives, delays = self._around.lives, self._shape.delays

        def later(delay_s: float, action: Callable[[], None]) -> None:
            def act() -> None:
                if journey in self._open and journey.attempts == attempt:
                    action()

            self._agenda.after(delay_s, act)

        if lives.host(placement.decode).is_dead:
            later(delays.detection_s, lambda: self._again(journey))
            return
        source = lives.host(placement.source) if placement.source is not None else None
        peer = lives.host(placement.peer) if placement.peer is not None else None
        try:
            lives.answers(placement.decode).open(journey, self, source, peer)
        except Overloaded:
            later(delays.open_s, lambda: self._elsewhere(journey, placement.decode))
            return
        later(delays.open_s, lambda: self._opened(journey))

    def _opened(self, journey: Journey) -> None:
        self.brain.opened(journey.request_id, self._agenda.now_s)
        self._tell()

    def _elsewhere(self, journey: Journey, full: WorkerId) -> None:
        self._open[journey] |= {full}
        self._again(journey)

    def _again(self, journey: Journey) -> None:
        self.brain.ended(journey.request_id, None, self._agenda.now_s)
        self._place(journey)

    def _first_token(self, journey: Journey) -> None:
        if journey in self._open:
            self.brain.first_token(journey.request_id, self._agenda.now_s)
            self._drain()

    def _end(self, journey: Journey, status: Status, retry_after_s: float | None = None) -> None:
        if journey not in self._open:
            return
        del self._open[journey]
        del self._by_id[journey.request_id]
        answer_tokens = journey.emitted if status is Status.DONE else None
        self.brain.ended(journey.request_id, answer_tokens, self._agenda.now_s)
        token_s = self._shape.delays.token_s
        self._around.over(journey.outcome(status, token_s, self._agenda.now_s, retry_after_s))
        self._drain()

    def _name_blocks(self, journey: Journey) -> None:
        """Blocks that the answer has filled since get their names."""
        names, size = journey.names, self._shape.block_size
        while (len(names) + 1) * size <= journey.known_tokens:
            names.append(name_block(names[-1] if names else root_name(), [TOKEN] * size))

    def _close_feed(self, worker: WorkerId) -> None:
        feed = self._feeds.pop(worker, None)
        if feed is not None:
            feed.close()

    # Below: telling other routers

    def _tell(self) -> None:
        if self.others and not self._is_telling:
            self._is_telling = True
            self._agenda.after(COALESCE_S, self._tell_now)

    def _tell_now(self) -> None:
        self._is_telling = False
        for other in self.others:
            news = self.brain.news(other.name)
            if news is not None:
                self._agenda.after(self._shape.delays.reservation_s, partial(other.hear_router, self.name, news))
