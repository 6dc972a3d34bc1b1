"""Few calls are ahead of the router, and none keeps its place for long."""

from __future__ import annotations

from router.grpc_listener.call_window import EXPIRES_S, MOST_UNSEEN, CallWindow


def full() -> CallWindow:
    window = CallWindow()
    assert all(window.take(("flood", stream), 0.0) for stream in range(MOST_UNSEEN))
    assert not window.take(("honest", 1), 0.0)
    return window


def test_the_next_call_goes_when_the_router_has_looked_at_one() -> None:
    window = full()
    window.seen(1)
    assert window.take(("honest", 1), 0.0)
    assert not window.take(("honest", 3), 0.0)


def test_a_call_that_has_ended_keeps_no_place() -> None:
    window = full()
    window.ended(("flood", 2))
    window.ended(("flood", 2))
    assert window.take(("honest", 1), 0.0)
    assert not window.take(("honest", 3), 0.0)


def test_a_call_that_the_router_never_sees_keeps_its_place_for_a_moment() -> None:
    window = full()
    assert window.expires_s() == EXPIRES_S
    assert not window.take(("honest", 1), 0.99 * EXPIRES_S)
    assert window.take(("honest", 1), EXPIRES_S)


def test_more_looks_than_calls_are_no_debt() -> None:
    window = full()
    window.seen(1000)
    assert window.expires_s() is None
    assert all(window.take(("flood", stream), 1.0) for stream in range(MOST_UNSEEN))
    assert not window.take(("honest", 1), 1.0)
