"""A request pays for no feature that it does not use: nothing of it runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from tests.unit.worker.callers import router_to
from tests.unit.worker.rig import decode, expected_tokens, paced, prompt_of
from twostroke.config import SPECULATE_AUTO, SPECULATE_OFF, ScheduleConfig

PROMPT = prompt_of(40)
LENGTH = 20
BRANCHES = ("twostroke/speculation/", "twostroke/grammar/", "twostroke/scheduler/constraints/")


@contextmanager
def called() -> Iterator[set[str]]:
    """Collects the functions of branches that this thread calls."""
    seen: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and any(branch in code.co_filename for branch in BRANCHES):
            seen.add(f"twostroke/{code.co_filename.rpartition('/twostroke/')[2]}:{code.co_name}")

    sys.setprofile(note)
    try:
        yield seen
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize(
    ("by_worker", "by_request"), [(SPECULATE_OFF, ""), (SPECULATE_OFF, "suffix"), (SPECULATE_AUTO, SPECULATE_OFF)]
)
async def test_nothing_of_a_branch_runs_for_a_plain_answer(by_worker: str, by_request: str) -> None:
    schedule = ScheduleConfig(speculate=by_worker)
    async with decode(model=paced(step_ms=1), schedule=schedule) as worker, router_to(worker) as router:
        with called() as seen:
            got = await router.answer(PROMPT, LENGTH, request_id="r", speculation=by_request)
        assert got.tokens == expected_tokens(PROMPT, LENGTH)
        assert not seen


async def test_drafters_are_called_where_they_may_propose() -> None:
    schedule = ScheduleConfig(speculate=SPECULATE_AUTO)
    async with decode(model=paced(step_ms=1), schedule=schedule) as worker, router_to(worker) as router:
        with called() as seen:
            await router.answer(PROMPT, LENGTH, request_id="r")
        assert any(name.endswith(":propose") for name in seen)
