"""Reservations bridge the time until a worker's own report shows what was placed on it."""

from __future__ import annotations

from router.routing.reservations import REPORT_LAG_S, Reservations, ReservedShare
from twostroke.base.ids import BlockHash, RequestId, WorkerId

R, Q = RequestId("r#0"), RequestId("q#0")
P, D = WorkerId("p"), WorkerId("d")
ONE, TWO = BlockHash(b"1" * 16), BlockHash(b"2" * 16)


def placed() -> Reservations:
    reservations = Reservations()
    reservations.place(
        R, {D: ReservedShare(5, pages=3, streams=1), P: ReservedShare(32, pages=2, streams=0)}, [ONE, TWO]
    )
    return reservations


def test_what_is_placed_counts_until_a_report_must_show_it() -> None:
    reservations = placed()
    reservations.reported(P, 10.0)
    assert reservations.on(P) == ReservedShare(32, pages=2, streams=0)
    reservations.opened(R, 10.0)
    reservations.reported(P, 10.0 + REPORT_LAG_S / 2)
    assert reservations.on(P) == ReservedShare(32, pages=2, streams=0)
    reservations.reported(P, 10.0 + REPORT_LAG_S * 2)
    assert reservations.on(P) == ReservedShare(0, pages=0, streams=0)
    assert reservations.on(D) == ReservedShare(5, pages=3, streams=1)


def test_shares_of_several_requests_add_up() -> None:
    reservations = placed()
    reservations.place(Q, {D: ReservedShare(1, pages=1, streams=1)}, [ONE])
    assert reservations.on(D) == ReservedShare(6, pages=4, streams=2)


def test_what_one_request_had_reserved_ends_with_it_and_nothing_else_does() -> None:
    reservations = placed()
    reservations.place(Q, {D: ReservedShare(1, 0.5, pages=1, streams=1)}, [ONE])
    reservations.end(R)
    assert reservations.on(D) == ReservedShare(1, 0.5, pages=1, streams=1)
    assert reservations.on(P) == ReservedShare()
    assert (reservations.requests_on(D), reservations.requests_on(P)) == (1, 0)
    reservations.end(Q)
    assert reservations.on(D) == ReservedShare()


def test_blocks_are_coming_until_the_last_request_for_them_has_ended() -> None:
    reservations = placed()
    reservations.place(Q, {D: ReservedShare(1, pages=1, streams=1)}, [ONE])
    assert set(reservations.coming(ONE)) == {P, D}
    reservations.end(R)
    assert set(reservations.coming(ONE)) == {D}
    assert set(reservations.coming(TWO)) == set()
    reservations.end(Q)
    assert set(reservations.coming(ONE)) == set()
    assert len(reservations) == 0


def test_a_second_placement_of_a_request_replaces_the_first() -> None:
    reservations = placed()
    reservations.place(R, {D: ReservedShare(7, pages=7, streams=1)}, [TWO])
    assert reservations.on(P) == ReservedShare(0, pages=0, streams=0)
    assert reservations.on(D) == ReservedShare(7, pages=7, streams=1)
    assert set(reservations.coming(ONE)) == set()
    reservations.end(R)
    reservations.end(R)
    assert len(reservations) == 0
