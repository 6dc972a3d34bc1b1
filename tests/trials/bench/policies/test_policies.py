"""`tests.trials.bench policies`: its flags, and what trials are compared by."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trials.bench.policies import run
from tests.trials.bench.policies.metrics import METRICS, compared, notes_of
from tests.trials.bench.policies.options import options_from
from tests.trials.bench.policies.readings import Busy, Reading, between
from tests.trials.bench.policies.replay import likeness, ranking
from tests.trials.bench.policies.trial import Trial
from tools.bench.compare.rounds import in_turns
from tools.bench.load import PlannedRequest, Segment, Stream
from tools.bench.measure import Answer, Failure, Record, summarise
from tools.simulate.fit.fitting import Log
from tools.simulate.fleet.shape import FleetShape
from tools.simulate.runs import Trial as Simulated
from tools.simulate.runs import run_trial
from tools.simulate.traces.trace import Replay, replayed
from tools.simulate.traces.workloads import generated
from twostroke.base.errors import ConfigError
from twostroke.observability.request_log import AnswerRecord

SMALL = ("--workload", "conversation", "--limit", "20", "--rate", "2", "--length-scale", "0.03125", "--seed", "5")
REFUSED = Failure("grpc RESOURCE_EXHAUSTED", "come back later")
Arguments = Callable[..., Any]


def record(index: int, ttft_s: float, failure: Failure | None = None) -> Record:
    planned = PlannedRequest(index, (Segment(Stream.OWN, index, 100),), 3, float(index))
    times = [] if failure else [index + ttft_s, index + ttft_s + 0.01, index + ttft_s + 0.02]
    answer = Answer(float(index), index + ttft_s + 0.02, times, len(times), "usage", 100, 25, failure)
    return Record(planned, float(index), answer)


def logged(predicted_s: float | None, ttft_s: float | None) -> AnswerRecord:
    return AnswerRecord(
        request_id="a#0", arrival_s=1.0, outcome="length", prompt_tokens=16, output_tokens=3, block_size=16,
        blocks="0" * 16, policy="kv", attempts=1, ttft_s=ttft_s, predicted_ttft_s=predicted_s,
    )  # fmt: skip


def trial(policy: str, round_number: int, ttft_s: float, *failures: Failure, machine: float = 0.5) -> Trial:
    records = [record(index, ttft_s) for index in range(3)]
    records += [record(3 + index, ttft_s, failure) for index, failure in enumerate(failures)]
    return Trial(
        round=round_number,
        utilisation=0.85,
        policy=policy,
        report=summarise(records, 0.0),
        busy=Busy({"prefill-0": 0.5, "prefill-1": 0.7}, machine),
        log=Log("log", (logged(1.1, 1.0), logged(0.7, 1.0), logged(None, 1.0), logged(0.95, 1.0)), ()),
    )


def test_policies_take_turns_and_the_order_turns() -> None:
    turns = [(turn[0], turn[2], turn[3]) for turn in in_turns(2, (0.6, 0.85), "abc")]
    assert len(set(turns)) == 12
    assert "".join(policy for _, _, policy in turns) == "abccbacbaabc"


def test_refused_requests_are_told_from_failed_ones_and_ratios_are_over_round_robin() -> None:
    trials = [
        trial("round-robin", 0, 1.0),
        trial("kv", 0, 0.5, REFUSED, Failure("timeout", "no answer")),
        trial("round-robin", 1, 2.0),
        trial("kv", 1, 0.5, REFUSED),
    ]
    (outcome,) = compared(trials, lambda utilisation: f"at {utilisation:g}", ("kv", "round-robin"), "round-robin")
    assert outcome.load == "at 0.85"
    ours = outcome.outcomes[0]
    assert (ours.values["completed"].total, ours.values["refused"].total, ours.values["failed"].total) == (6, 2, 1)
    assert ours.ratios["ttft_mean_s"].values == pytest.approx((0.5, 0.25))
    assert ours.values["hit_rate"].median == pytest.approx(0.25)
    assert ours.values["utilisation"].median == pytest.approx(0.6)
    assert ours.values["prediction_error"].median == pytest.approx(0.1)
    assert ours.values["prediction_bias"].median == pytest.approx(-0.05)
    assert "prediction_bias" not in ours.ratios
    assert {metric.key for metric in METRICS} == set(ours.values)


def test_a_busy_machine_and_every_kind_of_failure_are_noted() -> None:
    notes = notes_of([trial("kv", 0, 1.0, REFUSED, machine=0.97)])
    assert any("97% busy" in note for note in notes)
    assert any("come back later" in note for note in notes)
    assert not notes_of([trial("kv", 0, 1.0)])


def test_a_worker_is_as_busy_as_its_counter_grew() -> None:
    first = Reading(10.0, {"prefill-0": 3.0}, 100.0, 1000.0)
    last = Reading(20.0, {"prefill-0": 8.0, "prefill-1": 1.0}, 190.0, 1100.0)
    busy = between(first, last)
    assert busy.workers == pytest.approx({"prefill-0": 0.5, "prefill-1": 0.1})
    assert (busy.utilisation, busy.machine) == pytest.approx((0.3, 0.9))


def test_what_was_simulated_stands_beside_the_median_of_real_rounds() -> None:
    trace = replayed(generated("conversation", 20, 2.0, 1), Replay())
    run = run_trial(Simulated(variant="kv", trace=trace, shape=FleetShape(prefill=1, decode=1), holds=True))
    found = likeness([trial("kv", 0, 1.0), trial("kv", 1, 3.0), trial("kv", 2, 2.0), trial("dynamo", 0, 9.0)], run)
    assert (found.policy, found.requests, found.real_s) == ("kv", 9, (2.0, 2.0))
    simulated_s = sorted(outcome.ttft_s for outcome in run.outcomes if outcome.ttft_s is not None)
    assert found.simulated_s[0] == pytest.approx((simulated_s[9] + simulated_s[10]) / 2)
    assert ranking(("a", "b", "c"), (3.0, None, 1.0)) == "c < a"


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        ((*SMALL, "--policies", "best"), "policies"),
        ((*SMALL, "--policies", "always-local"), "policies"),
        ((*SMALL, "--utilisations", "0.5", "-1"), "utilisations"),
        ((*SMALL, "--rounds", "0"), "rounds"),
        ((*SMALL, "--log-dir", "/nowhere"), "log_dir"),
        ((*SMALL, "--prefill", "0"), "prefill"),
        ((*SMALL, "--serve-flags=--policy kv"), "serve_flags"),
        ((*SMALL, "--serve-flags=--seed=7"), "serve_flags"),
        (("--limit", "5"), "trace"),
    ],
)
def test_bad_flags_are_refused_by_name(arguments: Arguments, flags: tuple[str, ...], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        options_from(arguments("policies", *flags))
    assert refused.value.field == field


def test_round_robin_is_always_among_them_and_other_flags_go_to_serve(arguments: Arguments, tmp_path: Path) -> None:
    options = options_from(
        arguments("policies", *SMALL, "--policies", "kv", "--serve-flags", "--threads 2 --no-local-prefill")
    )
    assert options.policies == ("kv", "round-robin")
    started = options.served.arguments("kv", tmp_path / "log")
    assert started[-3:] == ["--threads", "2", "--no-local-prefill"]
    assert started[started.index("--seed") + 1] == "5"


def test_a_cluster_that_does_not_start_says_why(arguments: Arguments) -> None:
    with pytest.raises(ConfigError, match=r"did not get ready(.|\n)*no-such-flag"):
        run(arguments("policies", *SMALL, "--serve-flags=--no-such-flag"))
