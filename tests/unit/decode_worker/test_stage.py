"""Every pair of stages: allowed by the table, or refused."""

from __future__ import annotations

import itertools

import pytest

from decode_worker.request_state import FINAL, NEXT, RequestState, Stage
from tests.unit.decode_worker.request_states import an_answer


@pytest.mark.parametrize(("before", "after"), list(itertools.product(Stage, Stage)), ids=lambda stage: stage.name)
def test_a_request_moves_only_as_the_table_says(before: Stage, after: Stage) -> None:
    answer: RequestState = an_answer()
    answer.stage = before
    if after in NEXT[before]:
        answer.move_to(after)
        assert answer.stage is after
    else:
        with pytest.raises(AssertionError, match=f"{before.name} -> {after.name}"):
            answer.move_to(after)
        assert answer.stage is before


def test_every_stage_is_reached_from_waiting_and_leads_to_an_end() -> None:
    assert set(NEXT) == set(Stage)
    assert {stage for stage in Stage if not NEXT[stage]} == FINAL
    reached = {Stage.WAITING}
    while more := set().union(*(NEXT[stage] for stage in reached)) - reached:
        reached |= more
    assert reached == set(Stage)
    assert all(Stage.FAILED in NEXT[stage] for stage in set(Stage) - FINAL), "a deadline may pass in any stage"
