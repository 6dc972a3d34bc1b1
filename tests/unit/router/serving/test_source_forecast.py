"""What a router tells a decode worker of the pull that it orders."""

from __future__ import annotations

from router.routing.policy import Decision, Forecast
from router.serving.placement import source_forecast
from twostroke.base.ids import WorkerId

FORECAST = Forecast(queue_s=0.5, fetch_s=0.2, prefill_s=2.0, cached_blocks=3, computed_tokens=160)


def test_a_decode_worker_learns_when_its_source_will_have_the_blocks() -> None:
    told = source_forecast(Decision(decode=WorkerId("d"), source=WorkerId("p"), forecast=FORECAST))
    assert told is not None
    assert (told.cached_blocks, told.fetch_s, told.wait_s, told.compute_s) == (3, 0.2, 0.5, 2.0)


def test_nothing_is_told_where_there_is_no_source_or_nothing_was_foreseen() -> None:
    assert source_forecast(Decision(decode=WorkerId("d"), source=None, forecast=FORECAST)) is None
    assert source_forecast(Decision(decode=WorkerId("d"), source=WorkerId("p"))) is None
