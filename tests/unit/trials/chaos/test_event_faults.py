"""Spoiled event streams: what is asked for is what happens, and a wrong wish is refused with its text."""

from __future__ import annotations

import pytest

from tests.trials.chaos.injection.event_faults import EventFaults, FaultRates
from twostroke.base.errors import ConfigError
from twostroke.rpc.v1.control_pb2 import KvEventBatch


def delivered(rates: FaultRates, count: int) -> list[int]:
    faults = EventFaults(rates, "decode-0")
    return [out.sequence for number in range(count) for out in faults.deliver(KvEventBatch(sequence=number))]


def test_nothing_happens_where_nothing_is_asked_for() -> None:
    assert FaultRates.parse("") is None
    assert delivered(FaultRates(), 50) == list(range(50))


@pytest.mark.parametrize(("fault", "change"), [("drop", -0.1), ("duplicate", 0.1), ("reorder", 0.0)])
def test_about_the_share_that_is_asked_for_is_lost_or_comes_twice(fault: str, change: float) -> None:
    out = delivered(FaultRates(**{fault: 0.1}), 5000)
    assert len(out) == pytest.approx(5000 * (1 + change), rel=0.03)
    assert (out == sorted(out)) == (fault != "reorder")


def test_a_reordered_batch_comes_right_after_the_next_one_that_comes() -> None:
    out = delivered(FaultRates(reorder=0.2, seed=3), 2000)
    late = [place for place in range(1, len(out)) if out[place] < out[place - 1]]
    assert len(late) > 100
    assert sorted(out)[:1900] == list(range(1900)), "none is lost"


def test_the_same_seed_and_stream_suffer_the_same_faults() -> None:
    rates = FaultRates.parse("drop:0.1,duplicate:0.1,reorder:0.1,seed:4")
    assert rates is not None
    assert delivered(rates, 300) == delivered(rates, 300)


@pytest.mark.parametrize(
    "text",
    ["drop", "drop:x", "loss:0.1", "drop:0.7,duplicate:0.7", "drop:-1", "drop:nan", "drop:0.1,drop:0.2", "seed:1.5"],
)
def test_a_wish_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="event faults"):
        FaultRates.parse(text)
