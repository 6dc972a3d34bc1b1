"""Routers that tell each other what they have placed, over streams that delay, repeat, lose and break."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from router.routing.reservations import (
    FOREIGN_TTL_S,
    LOST_GRACE_S,
    NOTHING,
    REPORT_LAG_S,
    Reservation,
    ReservationChanges,
    Reservations,
    ReservationWatch,
    ReservedShare,
)
from twostroke.base.ids import BlockHash, RequestId, RouterId, WorkerId

A, B = RouterId("router-a"), RouterId("router-b")
R, Q = RequestId("r#0"), RequestId("q#0")
WORKERS = [WorkerId(f"w{index}") for index in range(5)]
NAMES = [BlockHash(bytes([index]) * 16) for index in range(12)]
P, D, *_ = WORKERS
ONE, TWO, *_ = NAMES
SHARES = {D: ReservedShare(5, 0.1, pages=3, streams=1), P: ReservedShare(32, 0.4, pages=2)}


def told(*, is_opened: bool = False, request_id: RequestId = R) -> ReservationChanges:
    reservation = Reservation(request_id=request_id, shares=SHARES, block_hashes=[ONE, TWO], is_opened=is_opened)
    return ReservationChanges(placed=(reservation,))


def test_foreign_and_own_reservations_are_one_account() -> None:
    reservations = Reservations()
    reservations.place(R, SHARES, [ONE])
    reservations.apply(A, told(), 0.0)
    assert (reservations.on(P).tokens, reservations.requests_on(P)) == (64, 2)
    assert set(reservations.coming(TWO)) == {P, D}
    reservations.end(R)
    assert (reservations.on(P), reservations.requests_on(P)) == (SHARES[P], 1)
    reservations.apply(A, ReservationChanges(ended=(R,)), 0.0)
    assert (reservations.on(P), len(reservations), set(reservations.coming(ONE))) == (NOTHING, 0, set())


def test_the_same_request_id_at_two_routers_is_two_requests() -> None:
    reservations = Reservations()
    reservations.apply(A, told(), 0.0)
    reservations.apply(B, told(), 0.0)
    reservations.apply(A, ReservationChanges(ended=(R,)), 0.0)
    assert reservations.on(D) == SHARES[D]


def test_a_report_after_the_opening_shows_foreign_requests_too() -> None:
    reservations = Reservations()
    reservations.apply(A, told(), 0.0)
    reservations.reported(P, 1.0)
    assert reservations.on(P) == SHARES[P]
    reservations.apply(A, ReservationChanges(opened=(R,)), 1.0)
    reservations.reported(P, 1.0 + REPORT_LAG_S / 2)
    assert reservations.on(P) == SHARES[P]
    reservations.reported(P, 1.0 + REPORT_LAG_S * 2)
    assert (reservations.on(P), reservations.on(D)) == (NOTHING, SHARES[D])
    assert set(reservations.coming(ONE)) == {P, D}


def test_what_a_worker_has_reported_to_its_router_is_not_told_again() -> None:
    owner, other = Reservations(), Reservations()
    owner.place(R, SHARES, [ONE])
    owner.opened(R, 0.0)
    owner.reported(P, 1.0)
    other.apply(A, owner.take(owner.watch(lambda: None)), 1.0, whole=True)
    assert (other.on(P), other.requests_on(P), other.on(D)) == (NOTHING, 0, SHARES[D])
    assert set(other.coming(ONE)) == {P, D}


def test_a_lost_router_is_believed_for_a_moment_and_a_returning_one_tells_all_anew() -> None:
    reservations = Reservations()
    reservations.apply(A, told(), 0.0, whole=True)
    reservations.apply(A, told(request_id=Q), 0.0)
    reservations.lost(A, 1.0)
    reservations.reported(P, 1.0 + LOST_GRACE_S / 2)
    assert reservations.requests_on(P) == 2
    reservations.apply(A, told(request_id=Q), 1.0 + LOST_GRACE_S / 2, whole=True)
    reservations.reported(P, 1.0 + LOST_GRACE_S * 2)
    assert reservations.requests_on(P) == 1
    reservations.lost(A, 5.0)
    reservations.reported(P, 5.0 + LOST_GRACE_S)
    assert len(reservations) == 0


def test_attempts_to_reach_a_lost_router_do_not_prolong_what_it_had_placed() -> None:
    reservations = Reservations()
    reservations.apply(A, told(), 0.0, whole=True)
    for attempt in range(5):
        reservations.lost(A, 1.0 + attempt * LOST_GRACE_S / 4)
    reservations.reported(P, 1.0 + LOST_GRACE_S)
    assert len(reservations) == 0


def test_a_reservation_of_which_nobody_speaks_any_more_ends_by_itself() -> None:
    reservations = Reservations()
    reservations.apply(A, told(), 0.0)
    reservations.apply(A, told(request_id=Q), 0.0)
    reservations.apply(A, ReservationChanges(opened=(R,)), 5.0)
    reservations.reported(WORKERS[4], FOREIGN_TTL_S + 1.0)
    assert (reservations.foreign_count, reservations.on(P)) == (1, SHARES[P])
    reservations.reported(WORKERS[4], FOREIGN_TTL_S + 5.0)
    assert len(reservations) == 0


def test_a_listener_hears_of_each_request_once_and_as_it_is_when_it_takes() -> None:
    told: list[str] = []
    reservations = Reservations()
    watch = reservations.watch(lambda: told.append("news"))
    reservations.place(R, SHARES, [ONE])
    reservations.place(Q, SHARES, [ONE])
    reservations.opened(R, 0.0)
    assert told == ["news"]
    batch = reservations.take(watch)
    assert [(each.request_id, each.is_opened) for each in batch.placed] == [(R, True), (Q, False)]
    assert (batch.opened, batch.ended) == ((), ())
    reservations.opened(Q, 0.0)
    assert reservations.take(watch) == ReservationChanges(opened=(Q,))
    reservations.end(Q)
    reservations.end(R)
    assert reservations.take(watch) == ReservationChanges(ended=(Q, R))
    assert told == ["news"] * 3


def test_a_listener_that_never_takes_keeps_no_more_than_what_is_open() -> None:
    reservations = Reservations()
    watch = reservations.watch(lambda: None)
    for index in range(1000):
        reservations.place(RequestId(f"{index}"), SHARES, [ONE])
        reservations.end(RequestId(f"{index}"))
    assert watch.changed == {}
    assert not reservations.take(watch)


@dataclass
class Wire:
    """From one router to another: batches come late and in order, some twice; it breaks and is made again."""

    source: Reservations
    name: RouterId
    target: Reservations
    under_way: deque[tuple[float, ReservationChanges, bool]] = field(default_factory=deque)
    watch: ReservationWatch | None = None

    def step(self, draws: random.Random, now_s: float) -> None:
        if self.watch is not None and draws.random() < 0.03:
            self.source.unwatch(self.watch)
            self.watch = None
            self.under_way.clear()
            self.target.lost(self.name, now_s)
        elif self.watch is None:
            self.watch = self.source.watch(lambda: None)
            self.under_way.append((now_s, self.source.take(self.watch), True))
        elif draws.random() < 0.5:
            batch = (now_s + draws.random() * 0.3, self.source.take(self.watch), False)
            self.under_way.extend([batch] * draws.choice([1, 1, 2]))
        self.deliver(now_s)

    def deliver(self, now_s: float, *, later_too: bool = False) -> None:
        while self.under_way and (later_too or self.under_way[0][0] <= now_s):
            _, batch, whole = self.under_way.popleft()
            self.target.apply(self.name, batch, now_s, whole=whole)

    def exchange_all(self, now_s: float) -> None:
        if self.watch is None:
            self.watch = self.source.watch(lambda: None)
            self.under_way.append((now_s, self.source.take(self.watch), True))
        self.under_way.append((now_s, self.source.take(self.watch), False))
        self.deliver(now_s, later_too=True)


def views(reservations: Reservations) -> Iterator[object]:
    for worker in WORKERS:
        on = reservations.on(worker)
        yield (on.tokens, on.pages, on.streams, pytest.approx(on.seconds), reservations.requests_on(worker))
    for name in NAMES:
        yield set(reservations.coming(name))


def history(routers: list[Reservations], draws: random.Random) -> Callable[[float], None]:
    """Something happens at one of the routers: a request is placed (again), opened, ended, or a worker reports."""
    open_ids: list[set[RequestId]] = [set() for _ in routers]

    def happen(now_s: float) -> None:
        index = draws.randrange(len(routers))
        router, mine = routers[index], open_ids[index]
        request_id = RequestId(str(draws.randrange(30)))
        match draws.choice(["place", "place", "opened", "end", "end", "report"]):
            case "place":
                workers = draws.sample(WORKERS, draws.choice([1, 2]))
                shares = {
                    w: ReservedShare(draws.randrange(1, 99), draws.random(), draws.randrange(9), 1) for w in workers
                }
                router.place(request_id, shares, NAMES[: draws.randrange(len(NAMES))])
                mine.add(request_id)
            case "opened":
                router.opened(request_id, now_s)
            case "end":
                router.end(request_id)
                mine.discard(request_id)
            case "report":
                for each in routers:
                    each.reported(WORKERS[draws.randrange(len(WORKERS))], now_s)

    return happen


@pytest.mark.parametrize("seed", range(8))
def test_routers_agree_whatever_happens_to_their_words(seed: int) -> None:
    draws = random.Random(seed)
    routers = {RouterId(f"router-{index}"): Reservations() for index in range(3)}
    wires = [Wire(a, name, b) for name, a in routers.items() for b in routers.values() if a is not b]
    happen = history(list(routers.values()), draws)
    now_s = 0.0
    for _ in range(1500):
        now_s += draws.random() * 0.02
        happen(now_s)
        for wire in wires:
            wire.step(draws, now_s)
    for wire in wires:
        wire.exchange_all(now_s)
    for worker in WORKERS:
        for router in routers.values():
            router.reported(worker, now_s + 1.0)
    first, *others = (list(views(router)) for router in routers.values())
    assert any(view != (0, 0, 0, 0.0, 0) for view in first[: len(WORKERS)])
    assert all(other == first for other in others)
    for router in routers.values():
        for index in range(30):
            router.end(RequestId(str(index)))
    for wire in wires:
        wire.exchange_all(now_s + 1.0)
    assert [len(router) for router in routers.values()] == [0, 0, 0]
    assert all(view in (set(), (0, 0, 0, 0.0, 0)) for router in routers.values() for view in views(router))
