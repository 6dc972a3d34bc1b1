"""Percentiles against numpy; reports of answers whose clock readings are known."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tools.bench.load import PlannedRequest, Segment, Stream
from tools.bench.measure import Answer, Failure, Record, distribution, summarise


def record(answer: Answer, *, due_at_s: float | None = None, output_tokens: int = 3) -> Record:
    return Record(PlannedRequest(0, (Segment(Stream.OWN, 0, 10),), output_tokens, None), due_at_s, answer)


FIRST = Answer(100.0, 101.0, [100.5, 100.6, 100.9], 3, "usage", prompt_tokens=10, cached_tokens=4, failure=None)
SECOND = Answer(100.5, 102.0, [100.7, 100.8, 101.9], 3, "usage", prompt_tokens=None, cached_tokens=None, failure=None)
REFUSED = Answer(101.5, 104.0, [101.6], 1, "events", None, None, Failure("http 429", "queue full"))


@pytest.mark.parametrize("count", [1, 2, 3, 10, 99, 100, 101, 1000])
def test_a_distribution_is_that_of_numpy_whatever_the_order(count: int) -> None:
    samples = np.random.default_rng(count).exponential(1.0, count).tolist()
    found = distribution(iter(samples))
    assert found is not None
    assert found.count == count
    assert found.max == max(samples)
    assert (found.mean, found.p50, found.p90, found.p99) == pytest.approx(
        (np.mean(samples), *np.percentile(samples, [50, 90, 99]))
    )


def test_no_samples_have_no_distribution() -> None:
    assert distribution([]) is None


def test_latencies_are_differences_of_the_clock_readings() -> None:
    report = summarise([record(FIRST), record(SECOND)], client_cpu_s=0.1)
    assert report.ttft_s is not None
    assert (report.ttft_s.count, report.ttft_s.mean, report.ttft_s.max) == pytest.approx((2, 0.35, 0.5))
    assert report.inter_token_s is not None
    assert (report.inter_token_s.count, report.inter_token_s.max) == pytest.approx((4, 1.1))
    assert report.inter_token_s.p50 == pytest.approx(0.2)
    assert report.tpot_s is not None
    assert (report.tpot_s.mean, report.tpot_s.max) == pytest.approx((0.4, 0.6))
    assert report.end_to_end_s is not None
    assert (report.end_to_end_s.mean, report.end_to_end_s.max) == pytest.approx((1.25, 1.5))


def test_rates_count_completed_tokens_over_the_whole_run() -> None:
    report = summarise([record(FIRST), record(SECOND), record(REFUSED)], client_cpu_s=0.1)
    assert report.duration_s == pytest.approx(4.0)
    assert (report.prompt_tokens, report.output_tokens, report.cached_tokens) == (20, 6, 4)
    assert report.output_tokens_per_s == pytest.approx(1.5)
    assert report.total_tokens_per_s == pytest.approx(6.5)
    assert report.requests_per_s == pytest.approx(0.5)


def test_failures_are_counted_by_kind_with_the_first_message_as_example_and_stay_out_of_latencies() -> None:
    again = dataclasses.replace(REFUSED, failure=Failure("http 429", "still full"))
    late = dataclasses.replace(REFUSED, failure=Failure("timeout", "no answer"))
    report = summarise([record(late), record(REFUSED), record(FIRST), record(again)], client_cpu_s=0)
    assert (report.requests, report.completed, report.failed) == (4, 1, 3)
    assert [(error.kind, error.count, error.example) for error in report.errors] == [
        ("http 429", 2, "queue full"),
        ("timeout", 1, "no answer"),
    ]
    assert report.ttft_s is not None
    assert report.ttft_s.count == 1


def test_a_run_in_which_all_failed_has_no_latencies() -> None:
    report = summarise([record(REFUSED)], client_cpu_s=0)
    assert report.completed == 0
    assert report.ttft_s is report.inter_token_s is report.tpot_s is report.end_to_end_s is None
    assert report.output_tokens_per_s == 0


def test_open_requests_overlap_only_while_both_are_open() -> None:
    after = dataclasses.replace(FIRST, sent_at_s=102.0, ended_at_s=103.0)
    assert summarise([record(FIRST), record(SECOND)], 0).peak_open_requests == 2
    assert summarise([record(SECOND), record(after)], 0).peak_open_requests == 1


def test_lag_is_how_late_requests_were_sent() -> None:
    report = summarise([record(FIRST, due_at_s=99.9), record(SECOND, due_at_s=100.5)], 0)
    assert report.send_lag_s is not None
    assert report.send_lag_s.max == pytest.approx(0.1)
    assert any("sent late" in note for note in report.notes)
    assert summarise([record(FIRST)], 0).send_lag_s is None


def test_several_tokens_in_an_event_are_said_and_leave_inter_token_latency_to_events() -> None:
    double = dataclasses.replace(FIRST, output_tokens=6)
    report = summarise([record(double, output_tokens=6)], 0)
    assert report.token_events == 3
    assert any("2.00 tokens into an event" in note for note in report.notes)
    assert report.tpot_s is not None
    assert report.tpot_s.mean == pytest.approx(0.4 / 5)
    assert not summarise([record(FIRST)], 0).notes


def test_missing_usage_short_answers_and_a_busy_client_are_said() -> None:
    counted = dataclasses.replace(FIRST, counted_by="events")
    notes = summarise([record(counted, output_tokens=5)], client_cpu_s=0.9).notes
    assert [word for word in ("no usage", "shorter than asked", "90% of a core") if any(word in n for n in notes)] == [
        "no usage",
        "shorter than asked",
        "90% of a core",
    ]
