"""The search for the highest good rate: its steps against an oracle, its verdict, and a whole search."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.bench import run
from tools.bench.goodput.options import Slo, options_from
from tools.bench.goodput.session import ratio_of
from tools.bench.goodput.trial import SloVerdict, arrivals_at, own_inter_token_p99_s
from tools.bench.measure import Answer, Failure
from tools.rate_search import Bracket, SearchLimits, Tried, bracket_of, decided, next_rate
from twostroke.base.errors import ConfigError

LIMITS = SearchLimits(start=0.5, lowest=0.02, highest=1000.0, precision=0.1)


def search(truth: float, limits: SearchLimits = LIMITS) -> list[Tried]:
    """At a server that passes at every rate up to `truth`."""
    tried: list[Tried] = []
    while (rate := next_rate(tried, limits)) is not None:
        tried.append(Tried(rate, rate <= truth))
        assert len(tried) < 100
    return tried


@given(st.floats(0.02, 999.0), st.floats(0.001, 1.0))
def test_the_truth_ends_up_in_a_bracket_as_narrow_as_asked_for(truth: float, precision: float) -> None:
    tried = search(truth, SearchLimits(start=0.5, lowest=0.02, highest=1000.0, precision=precision))
    bracket = bracket_of(tried)
    assert bracket.passing is not None
    assert bracket.failing is not None
    assert bracket.passing <= truth < bracket.failing
    assert bracket.failing <= bracket.passing * (1 + precision) * (1 + 1e-12)
    assert len({each.rate for each in tried}) == len(tried), "no rate is tried twice"


def test_a_precision_that_no_number_has_ends_between_neighbours() -> None:
    assert len(search(3.3, SearchLimits(start=0.5, lowest=0.02, highest=1000.0, precision=1e-18))) < 100


def test_a_server_that_never_passes_ends_at_the_lowest_rate() -> None:
    tried = search(0.0)
    assert tried[-1] == Tried(0.02, False)
    assert bracket_of(tried) == Bracket(None, 0.02)


def test_a_server_that_always_passes_ends_at_the_highest_rate() -> None:
    tried = search(float("inf"))
    assert tried[-1] == Tried(1000.0, True)
    assert bracket_of(tried) == Bracket(1000.0, None)


@given(st.lists(st.booleans(), max_size=200))
def test_a_search_ends_whatever_a_noisy_server_answers(answers: list[bool]) -> None:
    tried: list[Tried] = []
    for passed in answers:
        rate = next_rate(tried, LIMITS)
        if rate is None:
            break
        assert LIMITS.lowest <= rate <= LIMITS.highest
        tried.append(Tried(rate, passed))
    assert len(tried) < 30


def test_a_lucky_pass_above_a_failure_does_not_count() -> None:
    assert bracket_of([Tried(1, True), Tried(2, False), Tried(3, True)]) == Bracket(1, 2)


@given(st.lists(st.booleans(), min_size=1, max_size=5), st.sampled_from([1, 3, 5]))
def test_a_rate_is_decided_once_most_of_its_votes_agree(votes: list[bool], of: int) -> None:
    tried = decided([Tried(1.0, vote) for vote in votes[:of]], of)
    needed = of // 2 + 1
    expected = [passed for passed in (True, False) if votes[:of].count(passed) >= needed]
    assert [each.passed for each in tried] == expected
    assert len(votes) < of or len(tried) == 1, "all votes together always decide"


def test_ratios_of_goodput_come_with_what_their_brackets_leave_open() -> None:
    assert ratio_of(Bracket(4, 5), Bracket(2, 2.5)) == {"ratio": 2, "min": 1.6, "max": 2.5}
    assert ratio_of(Bracket(4, None), Bracket(2, None)) == {"ratio": 2, "min": None, "max": None}
    assert ratio_of(Bracket(4, 5), Bracket(None, 0.02)) is None


def answer(ttft_s: float, gaps_s: list[float], failure: Failure | None = None) -> Answer:
    times = [ttft_s]
    for gap_s in gaps_s:
        times.append(times[-1] + gap_s)
    return Answer(0.0, times[-1], times, len(times), "usage", 8, None, failure)


PROMISE = Slo(ttft_s=1.0, inter_token_ms=100.0, share=0.9)
GOOD = answer(1.0, [0.0625] * 200)


def test_a_request_is_good_if_it_meets_both_promises() -> None:
    verdict = SloVerdict(PROMISE, 100)
    verdict.add(GOOD)
    verdict.add(answer(1.01, [0.2]))
    verdict.add(answer(0.5, [0.0625] * 97 + [0.2] * 3))
    verdict.add(answer(0.5, [0.0625] * 199 + [9.0]))
    verdict.add(answer(0.5, [], Failure("timeout", "")))
    verdict.add(answer(0.5, []))
    met = (verdict.met, verdict.missed_ttft, verdict.missed_inter_token, verdict.failed)
    assert met == (3, 1, 1, 1), "one long gap in 200 is outside of the p99; an answer of one token has none"
    assert own_inter_token_p99_s(answer(0.5, [])) == 0


@pytest.mark.parametrize(("requests", "needed"), [(10, 9), (20, 18), (21, 19), (1, 1)])
def test_a_verdict_is_certain_as_soon_as_the_rest_cannot_change_it(requests: int, needed: int) -> None:
    passing, failing = SloVerdict(PROMISE, requests), SloVerdict(PROMISE, requests)
    for _ in range(needed):
        assert passing.passed is None
        passing.add(GOOD)
    assert passing.passed is True
    for _ in range(requests - needed + 1):
        assert failing.passed is None
        failing.add(answer(5.0, []))
    assert failing.passed is False


@pytest.mark.parametrize("kind", ["poisson", "constant"])
def test_few_arrivals_still_have_the_rate_that_was_asked_for(kind: str) -> None:
    arrivals = arrivals_at(4.0, 20, kind, seed=1)
    assert all(0 <= earlier <= later <= 5.0 for earlier, later in pairwise(arrivals))
    doubled = arrivals_at(8.0, 20, kind, seed=1)
    assert [2 * each for each in doubled] == pytest.approx(arrivals), "one pattern at every rate, only denser"


async def test_the_rate_at_which_a_server_starts_to_refuse_is_found(
    openai_server: Any, arguments: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server has room for three requests at once: at 4096 a second all come while the first is being answered."""
    out = tmp_path / "goodput.json"
    flags = ["--prompt-tokens", "8", "--output-tokens", "5", "--arrivals", "constant", "--duration", "0.1"]
    flags += ["--min-requests", "8", "--start-rate", "8", "--max-rate", "4096", "--precision", "0.5", "--share", "0.5"]
    flags += ["--votes", "3"]
    flags += ["--slo-ttft", "30", "--slo-itl", "30000", "--json", str(out)]
    url = f"{openai_server.url},name=a,model=narrow"
    status = await asyncio.to_thread(run, arguments("goodput", url, *flags))
    assert status == 0
    found = json.loads(out.read_text())["endpoints"]["a"]
    assert found["goodput_per_s"] >= 8
    assert found["failing_per_s"] <= found["goodput_per_s"] * 1.5 * (1 + 1e-9)
    assert [trial["rate"] for trial in found["trials"]][:2] == [8.0, 8.0], "the second vote decides"
    assert found["trials"][0]["passed"] is True
    assert all(trial["missed_ttft"] == trial["missed_inter_token"] == 0 for trial in found["trials"])
    printed = capsys.readouterr()
    assert "passes at" in printed.out
    assert "8 requests/s, a: passes" in printed.err
    prompts = [tuple(body["prompt"]) for body in openai_server.bodies if body["max_tokens"] == 5]
    assert len(set(prompts)) == len(prompts), "no prompt is sent twice, so that none is cached"


async def test_a_server_that_keeps_no_promise_is_status_1(openai_server: Any, arguments: Any) -> None:
    flags = ["--prompt-tokens", "8", "--output-tokens", "5", "--duration", "0.1", "--min-requests", "4"]
    flags += ["--start-rate", "64", "--min-rate", "32", "--slo-ttft", "1e-6"]
    assert await asyncio.to_thread(run, arguments("goodput", openai_server.url, *flags)) == 1


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["--slo-ttft", "0"], "slo_ttft"),
        (["--slo-itl", "-1"], "slo_itl"),
        (["--share", "0"], "share"),
        (["--share", "1.1"], "share"),
        (["--precision", "0"], "precision"),
        (["--duration", "0"], "duration"),
        (["--min-requests", "0"], "min_requests"),
        (["--votes", "2"], "votes"),
        (["--start-rate", "0.01"], "start_rate"),
        (["--max-rate", "nan"], "max_rate"),
        (["--min-rate", "0"], "min_rate"),
        (["--prompt-tokens", "0"], "prompt_tokens"),
        (["--output-tokens", "0"], "output_tokens"),
    ],
)
def test_a_wrong_flag_is_refused_by_name(arguments: Any, flags: list[str], field: str) -> None:
    with pytest.raises(ConfigError, match=f"--{field.replace('_', '-')}") as caught:
        options_from(arguments("goodput", "http://a", *flags))
    assert str(caught.value.field).removeprefix("--").replace("-", "_") == field
