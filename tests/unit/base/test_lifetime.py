"""Named instants of a request."""

from __future__ import annotations

from twostroke.base.lifetime import Instant, Lifetime


def test_instants_of_two_processes_stand_in_the_order_in_which_they_happened() -> None:
    clock = iter([10.0, 30.0])
    lifetime = Lifetime(lambda: next(clock))
    lifetime.mark(Instant.RECEIVED)
    lifetime.mark(Instant.FIRST_TOKEN)
    lifetime.merge({"admitted": 20.0, "received": 99.0})
    assert list(lifetime.as_dict().items()) == [("received", 10.0), ("admitted", 20.0), ("first_token", 30.0)]
    assert lifetime.between(Instant.RECEIVED, Instant.ADMITTED) == 10.0
    assert lifetime.between(Instant.RECEIVED, Instant.DONE) is None
