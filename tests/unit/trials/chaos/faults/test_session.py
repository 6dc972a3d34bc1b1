from __future__ import annotations

import argparse
import random
import socket
from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests import process_table
from tests.trials.chaos.faults.bounds import overruns
from tests.trials.chaos.faults.load import Endpoint, asks
from tests.trials.chaos.faults.options import FaultsOptions, add_arguments, options_from
from tests.trials.chaos.faults.outcome import MISMATCHES, Drafts, Outcome, PoolRest
from tests.trials.chaos.faults.report import Facts, summary, written
from tests.trials.chaos.faults.session import shared_out
from tests.trials.chaos.faults.trials import ANYWHERE, HEAD, PROCESSES, QUICK, Trial, drawn, trials
from tests.trials.chaos.injection.plan import Kind
from tests.trials.chaos.injection.points import OF_FIRST_RANKS, OF_RANKS, REACHED_BY, Process
from twostroke.base.errors import ConfigError
from twostroke.base.fault_points import Point

REACHED = {point.value for point in Point if Process.DECODE in REACHED_BY[point]}
"""Points of decode workers."""


def options(*flags: str) -> FaultsOptions:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return options_from(parser.parse_args(flags))


def outcome(trial: Trial, **changes: object) -> Outcome:
    fields: dict[str, object] = {
        "transports": "tcp",
        "model": "paced:",
        "broken": "decode-1",
        "fault": "f",
        "has_happened": True,
        "streams": 9,
        "wrong": (),
        "left": None,
        "missing": None,
        "recovery_s": 0.5,
        "slowest": "greedy",
        "resumed": 1,
    }
    return Outcome(trial=trial, **(fields | changes))  # type: ignore[arg-type]


def test_every_point_and_every_kind_of_fault_is_tried() -> None:
    everything = trials("tcp", 1, ())
    assert {trial.point for trial in everything} == {*(point.value for point in Point), ANYWHERE}
    assert {trial.kind for trial in everything} == set(Kind) - OF_RANKS
    assert {trial.kind for trial in trials("tcp", 1, (), ranks=2)} == OF_RANKS | OF_FIRST_RANKS
    assert {trial.process for trial in everything} == set(PROCESSES)
    assert len(set(everything)) == len(everything)


def test_order_and_counts_come_from_the_seed_alone() -> None:
    assert trials("tcp", 1, ()) == trials("tcp", 1, ())
    assert trials("tcp", 1, ()) != trials("tcp", 2, ())
    trial = Trial("decode", Point.DECODE_SAMPLED, Kind.KILL)
    assert [trial.count(random.Random(3)) for _ in range(2)] == [trial.count(random.Random(3))] * 2


def test_a_drawn_part_has_every_kind_at_every_point_before_one_comes_there_again() -> None:
    everything = trials("tcp", 1, (), ranks=2)
    kinds_at_points = {(trial.point, trial.kind) for trial in everything}
    some = drawn(everything, len(kinds_at_points), random.Random(4))
    assert {(trial.point, trial.kind) for trial in some} == kinds_at_points
    shared = [trial for trial in some if trial.point == Point.PULL_COPIED]
    assert Counter(trial.process for trial in shared) == {"decode": 3, "prefill": 3}
    assert some == drawn(everything, len(kinds_at_points), random.Random(4))
    few = drawn(trials("tcp", 1, ("decode/*/*",)), len(REACHED), random.Random(4))
    assert {trial.point for trial in few} == REACHED
    assert max(Counter(trial.kind for trial in few).values()) < len(REACHED) / 4
    assert len(drawn(everything, 10**6, random.Random(4))) == len(everything)


def test_each_fault_is_tried_on_one_cluster_and_only_where_it_makes_sense() -> None:
    shares = shared_out(options("--seed", "5"))
    tried = [trial for _, wanted in shares for trial in wanted]
    assert sorted(map(str, tried)) == sorted(map(str, trials("tcp", 5, ())))
    (first, most), (second, some) = shares
    assert (first, second) == ("tcp", "")
    assert len(most) > 3 * len(some) > 0
    assert set(some) <= set(trials("shm", 5, ()))


def test_the_quick_part_breaks_every_kind_of_process_that_serves() -> None:
    ((_, wanted),) = shared_out(options("--quick", "--transports", "tcp"))
    assert sorted(map(str, wanted)) == sorted(QUICK)
    assert {trial.process for trial in wanted} == {"decode", "prefill", "router"}


def test_patterns_choose() -> None:
    assert {trial.kind for trial in trials("tcp", 1, ("decode/pull.*/kill",))} == {Kind.KILL}
    assert trials("tcp", 1, ("head/*",)) != []


def test_requests_of_one_seed_are_the_same_and_of_every_kind() -> None:
    load = asks(7, tokens=60, prompt_letters=320)
    assert load == asks(7, tokens=60, prompt_letters=320)
    assert {ask.conduct for ask in load} == {"stays", "moves", "leaves"}
    assert any(ask.n > 1 for ask in load)
    assert {ask.endpoint for ask in load if ask.is_scored} == {*Endpoint}
    assert len({ask.name for ask in load}) == len(load)


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "ok"),
        ({"has_happened": False}, "not reached"),
        ({"wrong": ("greedy: tokens differ",)}, "greedy: tokens differ"),
        ({"left": "decode-0: 1 active"}, "decode-0: 1 active"),
        ({"refused": {MISMATCHES: 2}}, "2 pages were damaged though nobody damaged them"),
        ({"missing": "only prefill-0 serves"}, "only prefill-0 serves"),
    ],
)
def test_a_miss_is_a_miss(changes: dict[str, object], verdict: str) -> None:
    found = outcome(Trial("decode", Point.DECODE_SAMPLED, Kind.KILL), **changes)
    assert found.verdict == verdict
    assert found.is_miss == (verdict != "ok")


KILL, STOP = (Trial("decode", Point.DECODE_SAMPLED, kind) for kind in (Kind.KILL, Kind.STOP))


@pytest.mark.parametrize(
    ("waits", "misses", "notes"),
    [
        ([(KILL, 2.9), (STOP, 4.9)], [], []),
        ([(KILL, 3.1)], ["killed: p99 of recovery 3.10 s"], []),
        ([(KILL, 1.0), (STOP, 5.2)], ["frozen or cut off: p99 of recovery 5.20 s"], []),
        ([(KILL, 3.1), *[(KILL, 1.0)] * 199], [], ["killed: over 3 s"]),
        ([(KILL, None), (STOP, None)], [], []),
    ],
)
def test_recovery_that_takes_too_long_is_a_miss_and_named(
    waits: list[tuple[Trial, float | None]], misses: list[str], notes: list[str]
) -> None:
    outcomes = [outcome(trial, recovery_s=wait) for trial, wait in waits]
    for found, expected in zip(overruns(outcomes), (misses, notes), strict=True):
        assert len(found) == len(expected)
        for text, begins in zip(found, expected, strict=True):
            assert text.startswith(begins)
            assert "decode/decode.sampled/" in text
            assert text in summary(outcomes, Facts.now(options().cluster, 1.0))


def test_what_a_real_model_takes_to_compute_again_is_told_and_no_miss() -> None:
    misses, notes = overruns([outcome(KILL, recovery_s=9.0, model="smollm2-135m")])
    assert not misses
    assert [note.partition(":")[0] for note in notes] == ["killed"]


def test_the_table_names_every_fault_and_misses_are_bold() -> None:
    facts = Facts.now(options("--seed", "11").cluster, 60.0)
    good = outcome(Trial("decode", Point.DECODE_SAMPLED, Kind.KILL))
    bad = outcome(
        Trial("router", Point.ROUTER_TOKEN, Kind.STOP),
        wrong=("greedy: gap",),
        recovery_s=4.25,
        met=1,
        refused={"twostroke_stale_attempts_total": 3},
    )
    head = outcome(Trial(HEAD, ANYWHERE, Kind.KILL), recovery_s=None)
    page = written([bad, good, head], facts, [], is_whole=True)
    assert "Why cells are empty" in page
    assert "Why cells are empty" not in written([bad, good, head], facts, [], is_whole=False)
    assert "| decode | decode.sampled | 9/9 0.50 s |  |" in page
    assert "| router | router.token |  | **8/9 4.25 s** |" in page
    assert "Seed 11" in page
    assert "1 of 1 that were frozen or cut off" in page
    assert "`twostroke_stale_attempts_total` 3" in page
    assert "MISS router/router.token/stop: greedy: gap" in summary([bad, good], facts)


def test_the_table_says_what_was_drafted_and_what_is_left_of_pages_on_ranks() -> None:
    facts = Facts.now(options().cluster, 60.0)
    drafting = outcome(KILL, drafts=Drafts(40, 7), draft_age_s=0.1)
    idle = outcome(STOP, drafts=Drafts(2, 1), draft_age_s=3.0)
    counts = {"total": 80, "free": 50, "cached": 20, "pinned": 8}
    rests = [
        PoolRest(worker="decode-0", ranks=2, drafting=3, **counts),
        PoolRest(worker="prefill-0", ranks=2, drafting=None, **counts),
    ]
    page = written([drafting, idle], facts, rests, is_whole=False)
    assert "42 run, 8 kept" in page
    assert "In 1 of 2 faults" in page
    assert f"(not: {STOP})" in page
    assert "| decode-0 | 2 | 80 | 50 | 20 | 8 | 2 | 3 |" in page
    assert "| prefill-0 | 2 | 80 | 50 | 20 | 8 | 2 |  |" in page
    plain = [PoolRest(worker="decode-0", ranks=1, drafting=None, **counts)]
    page = written([outcome(KILL)], facts, plain, is_whole=False)
    assert "draft" not in page
    assert "decode-0 |" not in page


def test_what_no_file_can_hold_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--write"):
        options("--write", str(tmp_path / "none.md"))


def test_the_kernel_says_where_a_process_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert listener.getsockname()[1] in process_table.listening_ports(psutil.Process())
