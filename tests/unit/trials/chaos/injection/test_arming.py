"""Faults armed in a process that runs: what is refused, and who answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trials.chaos.injection import control
from tests.trials.chaos.injection.injector import Injector
from tests.trials.chaos.injection.plan import Guard
from twostroke.base.errors import DeadlineExceeded, PeerLost
from twostroke.base.fault_points import Point


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.fixture
def here(journal: Path) -> Injector:
    injector = Injector(journal=str(journal))
    injector.begin("here")
    return injector


async def test_a_fault_is_armed_and_healed_by_call(here: Injector, journal: Path) -> None:
    await control.arm(journal, "here", "worker.events:lose:2")
    assert [here.reach(Point.WORKER_EVENTS) for _ in range(3)] == [False, True, False]
    await control.arm(journal, "here", "worker.events:lose")
    assert await control.heal(journal, "here") == {"worker.events": 3}
    assert not here.reach(Point.WORKER_EVENTS)


async def test_a_guard_is_off_until_another_one_is(here: Injector, journal: Path) -> None:
    await control.switch_off(journal, "here", Guard.DIGESTS)
    assert here.is_off(Guard.DIGESTS)
    await control.switch_off(journal, "here", None)
    assert not here.is_off(Guard.DIGESTS)


async def test_what_is_no_fault_is_refused(here: Injector, journal: Path) -> None:
    with pytest.raises(PeerLost, match="there is no point 'nowhere'"):
        await control.arm(journal, "here", "nowhere:kill")


async def test_a_process_that_has_the_port_of_a_dead_one_arms_nothing(here: Injector, journal: Path) -> None:
    control.port_file(journal, "here").rename(control.port_file(journal, "gone"))
    with pytest.raises(PeerLost, match="this process is here"):
        await control.arm(journal, "gone", "worker.events:lose")
    assert not here.reach(Point.WORKER_EVENTS)


async def test_who_is_not_there_is_not_waited_for_without_end(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "ANSWER_S", 0.2)
    with pytest.raises((PeerLost, DeadlineExceeded)):
        await control.heal(journal, "nobody")


def test_a_life_begins_with_the_fault_that_was_left_for_it(journal: Path) -> None:
    Path(f"{journal}.there").write_text("worker.events:lose")
    injector = Injector(journal=str(journal))
    injector.begin("there")
    assert injector.reach(Point.WORKER_EVENTS)
    assert not Path(f"{journal}.there").exists()
