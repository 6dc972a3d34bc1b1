"""What a fault is, and which faults make sense where."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trials.chaos.injection.plan import FROZEN_S, Fault, Kind
from tests.trials.chaos.injection.points import (
    EVENTS,
    OF_FIRST_RANKS,
    OF_RANKS,
    REACHED_BY,
    SPOILING,
    Cell,
    Process,
    cells,
    why_not,
)
from twostroke.base.errors import ConfigError
from twostroke.base.fault_points import Point


def test_a_fault_is_what_its_text_says() -> None:
    assert Fault.parse("decode.sampled:kill:3") == Fault(Point.DECODE_SAMPLED, Kind.KILL, 3, FROZEN_S)
    assert Fault.parse("router.view:stop") == Fault(Point.ROUTER_VIEW, Kind.STOP, 1, FROZEN_S)
    slow = Fault(Point.PULL_ASKING, Kind.SLOW, 2, 1.5)
    assert Fault.parse(str(slow)) == slow


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kill", "a fault is point:kind:count"),
        ("decode.sampled:kill:1:1:1", "a fault is point:kind:count"),
        ("decode.sampeld:kill:1", "there is no point 'decode.sampeld'; there are router.received"),
        ("decode.sampled:murder:1", "there is no fault 'murder'; there are kill, stop"),
        ("decode.sampled:kill:often", "are numbers"),
        ("decode.sampled:kill:0", "are positive"),
        ("decode.sampled:stop:1:-2", "are positive"),
        ("decode.sampled:stop:1:inf", "are positive"),
        ("decode.sampled:stop:1:nan", "are positive"),
        ("", "a fault is point:kind:count"),
    ],
)
def test_what_is_no_fault_is_refused_in_one_line(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refusal:
        Fault.parse(text)
    assert "\n" not in refusal.value.message
    assert refusal.value.field == "TWOSTROKE_FAULT"


def test_every_cell_makes_sense_or_says_in_one_line_why_not() -> None:
    for transport in ("tcp", "shm"):
        sensible = set(cells(transport))
        for process in Process:
            for point in Point:
                for kind in Kind:
                    cell = Cell(process, point, kind)
                    why = why_not(cell, transport)
                    assert (why is None) == (cell in sensible)
                    assert why is None or (why and "\n" not in why), cell


def test_every_point_can_be_killed_frozen_and_cut_off_in_each_process_that_comes_to_it() -> None:
    sensible = cells()
    for point in Point:
        for process in REACHED_BY[point]:
            assert {Cell(process, point, kind) for kind in (Kind.KILL, Kind.STOP, Kind.PARTITION)} <= set(sensible)
    assert len({cell.point for cell in sensible}) == len(Point) >= 25


def test_each_rank_of_a_worker_is_killed_frozen_and_cut_off_at_every_point() -> None:
    found = set(cells(ranks=2))
    workers = (Process.DECODE, Process.PREFILL)
    assert {cell.kind for cell in found} == OF_FIRST_RANKS | OF_RANKS
    assert len(found) == 6 * sum(worker in REACHED_BY[point] for point in Point for worker in workers)
    assert not OF_RANKS & {cell.kind for cell in cells()}


def test_pages_are_spoilt_where_they_travel_and_events_lost_where_they_are_at_hand() -> None:
    over_tcp, over_shm = set(cells()), set(cells("shm"))
    assert {cell.point for cell in over_tcp if cell.kind is Kind.LOSE} == EVENTS
    assert all(cell.process in (Process.DECODE, Process.PREFILL) for cell in over_tcp if cell.kind in SPOILING)
    assert Cell(Process.PREFILL, Point.PAGES_ANNOUNCING, Kind.TRUNCATE) in over_tcp
    assert {(cell.point, cell.kind) for cell in over_shm if cell.kind in SPOILING} == {
        (point, Kind.CORRUPT)
        for point in (Point.PULL_ASKING, Point.PULL_ANNOUNCED, Point.TRANSPORT_CONNECTING, Point.TRANSPORT_ASKING)
    }
    assert not {cell for cell in over_shm if cell.point in (Point.TRANSPORT_SERVING, Point.TRANSPORT_SENT)}


def test_every_point_is_in_the_code_of_a_process_that_comes_to_it() -> None:
    folders = {
        Process.ROUTER: ["router"],
        Process.DECODE: ["decode_worker", "twostroke"],
        Process.PREFILL: ["prefill_worker", "twostroke"],
        Process.SUPERVISOR: ["cluster"],
    }
    root = Path(__file__).parents[5]
    code = {
        folder: "".join(path.read_text() for path in (root / folder).rglob("*.py"))
        for folder in ("router", "decode_worker", "prefill_worker", "twostroke", "cluster")
    }
    for point in Point:
        for process in REACHED_BY[point]:
            assert any(f"Point.{point.name}" in code[folder] for folder in folders[process]), (point, process)
