"""Loads, turns, ratios and figures of `bench compare`, as the pure functions they are."""

from __future__ import annotations

import re
from collections import Counter
from itertools import combinations, pairwise
from typing import Any
from xml.etree import ElementTree

import pytest

from tools.bench.compare.page import first_token_samples, timeline_figure
from tools.bench.compare.report import compared, notes_of
from tools.bench.compare.rounds import CompareRun, plan_of, server_runs, warmup_of
from tools.bench.compare.scenario import ScenarioLoad, parse_scenario
from tools.bench.endpoints import Endpoint
from tools.bench.load import PlannedRequest, Segment, Speller, Stream
from tools.bench.measure import Answer, Failure, Record, summarise
from tools.figures.charts import PALETTE, Series, latency_figure
from twostroke.base.errors import ConfigError

STEP_S = 0.125
"""A power of two: sums of it are exact."""


def record(index: int, ttft_s: float, tokens: int, sent_at_s: float = 0.0, failure: Failure | None = None) -> Record:
    times = [sent_at_s + ttft_s + STEP_S * number for number in range(tokens)]
    planned = PlannedRequest(index, (Segment(Stream.OWN, index, 8),), tokens, None)
    answer = Answer(sent_at_s, times[-1] if times else sent_at_s + ttft_s, times, tokens, "usage", 8, None, failure)
    return Record(planned, None, answer)


def run_of(endpoint: str, round_number: int, ttft_s: float, tokens: int = 5, **kind: Any) -> CompareRun:
    records = (record(0, ttft_s, tokens, **kind),)
    load = parse_scenario("8x5@c1x1").loads[0]
    return CompareRun(round_number, load, endpoint, records, summarise(records, 0.0))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("128x64@c1", (128, 64, 6, 1, None)),
        ("128x64@c16", (128, 64, 32, 16, None)),
        ("128x64@c16x20", (128, 64, 20, 16, None)),
        ("1024x128@r0.5x40", (1024, 128, 40, None, 0.5)),
        ("1024x128@r0.5", (1024, 128, 15, None, 0.5)),
        ("burst:1056x128x16", (1056, 128, 16, 16, None)),
    ],
)
def test_a_load_is_told_by_its_name(text: str, expected: tuple[object, ...]) -> None:
    (load,) = parse_scenario(text).loads
    assert load.name == text
    assert (load.prompt_tokens, load.output_tokens, load.requests, load.concurrency, load.rate) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "128x64", "128x64@16", "128x0@c1", "0x1@c1", "1x1@r0", "burst:8x8", "shared:64/64x8x4", "128x64@c1x"),
        *("chats:4x1/1:8+8x4@c1", "chats:0x2/1:8+8x4@c1", "chats:4x2:8+8x4@c1"),
    ],
)
def test_a_load_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--load") as caught:
        parse_scenario(text)
    assert caught.value.field == "load"


def spelled(load: ScenarioLoad, seed: int) -> list[list[int]]:
    return [Speller(30000, seed).token_ids(planned.prompt) for planned in plan_of(load, seed)]


def test_every_turn_of_a_chat_repeats_what_was_said_in_it_and_nothing_of_another() -> None:
    first, later = parse_scenario("chats:6x3/2:32+16x8@c2").loads
    assert (first.requests, later.requests, first.concurrency) == (6, 12, 2)
    prompts = spelled(first, 7) + spelled(later, 7)
    assert [len(prompt) for prompt in prompts] == [48] * 6 + [72] * 6 + [96] * 6
    assert (first.prompt_tokens, later.prompt_tokens) == (48, 96)
    turns = [prompts[start : start + 6] for start in (0, 6, 12)]
    for earlier, after in pairwise(turns):
        assert all(prompt[: len(before)] == before for before, prompt in zip(earlier, after, strict=True))
    for one, other in combinations(range(6), 2):
        same = next(at for at, (a, b) in enumerate(zip(turns[2][one], turns[2][other], strict=True)) if a != b)
        assert same == (32 if one % 2 == other % 2 else 0)


def test_the_warm_run_has_the_prefix_of_the_cold_one_and_no_ending() -> None:
    cold, warm = parse_scenario("shared:64/48x8x4").loads
    assert (cold.name, warm.name) == ("shared:64/48x8x4 cold", "shared:64/48x8x4 warm")
    prompts = spelled(cold, 7) + spelled(warm, 7)
    assert {len(prompt) for prompt in prompts} == {64}
    assert len({tuple(prompt[:48]) for prompt in prompts}) == 1
    assert len({prompt[48] for prompt in prompts}) == len(prompts) == 8
    warming = [Speller(30000, 7).token_ids(each.prompt) for load in (cold, warm) for each in warmup_of(load, 2)]
    assert not {tuple(prompt[:16]) for prompt in warming} & {tuple(prompt[:16]) for prompt in prompts}
    assert {len(prompt) for prompt in warming} == {64}


def test_an_open_loop_has_due_times_and_a_closed_one_has_none() -> None:
    due = [each.due_s for each in plan_of(parse_scenario("8x8@r4x50").loads[0], 3)]
    assert all(earlier < later for earlier, later in pairwise(due))  # type: ignore[operator]  # None would fail here
    assert {each.due_s for each in plan_of(parse_scenario("8x8@c4x50").loads[0], 3)} == {None}


@pytest.mark.parametrize("rounds", [1, 2, 3, 4])
@pytest.mark.parametrize("names", ["ab", "abc"])
def test_every_endpoint_meets_every_load_once_a_round_and_the_order_turns(rounds: int, names: str) -> None:
    scenarios = [parse_scenario(text) for text in ("8x8@c1", "8x8@c2", "8x8@c3")]
    endpoints: list[Any] = [Endpoint(name, None, 0) for name in names]  # type: ignore[arg-type]  # never asked
    turns = server_runs(rounds, scenarios, endpoints)
    counts = Counter((turn.round, turn.scenario.name, turn.endpoint.name) for turn in turns)
    assert set(counts.values()) == {1}
    assert len(counts) == rounds * 3 * len(names)
    prompts = {
        (turn.round, turn.scenario.name): {
            other.number for other in turns if other.round == turn.round and other.scenario is turn.scenario
        }
        for turn in turns
    }
    assert all(len(numbers) == 1 for numbers in prompts.values())
    assert len({number for numbers in prompts.values() for number in numbers}) == rounds * 3
    firsts = [turns[at].endpoint.name for at in range(0, len(turns), len(names))]
    for scenario in range(3):
        own = firsts[scenario::3]
        assert all(earlier != later for earlier, later in pairwise(own))


def test_ratios_are_taken_round_by_round() -> None:
    """Both endpoints slow down fourfold in the second round: the ratio does not move."""
    runs = [
        run_of("a", 0, 1.0),
        run_of("b", 0, 2.0),
        run_of("b", 1, 8.0),
        run_of("a", 1, 4.0),
        run_of("a", 2, 1.0),
        run_of("b", 2, 3.0),
    ]
    (outcome,) = compared(runs, ["a", "b"], "a")
    base, other = outcome.outcomes
    assert base.ratios == {}
    assert base.values["ttft_p50_s"].values == (1.0, 4.0, 1.0)
    ratio = other.ratios["ttft_p50_s"]
    assert (ratio.values, ratio.median, ratio.low, ratio.high) == ((2.0, 2.0, 3.0), 2.0, 2.0, 3.0)
    assert other.ratios["tpot_mean_s"].values == (1.0, 1.0, 1.0)
    assert "failed" not in other.ratios, "nothing over no error is not a number"


def test_the_baseline_may_be_any_endpoint() -> None:
    (outcome,) = compared([run_of("a", 0, 1.0), run_of("b", 0, 2.0)], ["a", "b"], "b")
    assert outcome.outcomes[0].ratios["ttft_p50_s"].values == (0.5,)
    assert outcome.outcomes[1].ratios == {}


def test_a_run_without_an_answer_has_no_ratio_but_a_note() -> None:
    broken = run_of("b", 0, 1.0, tokens=0, failure=Failure("http 500", "gone"))
    (outcome,) = compared([run_of("a", 0, 1.0), broken], ["a", "b"], "a")
    assert "ttft_p50_s" not in outcome.outcomes[1].ratios
    assert outcome.outcomes[1].values["failed"].total == 1
    assert notes_of([broken, broken]) == ["b: http 500 (gone) [8x5@c1x1]"]


def test_merged_tokens_are_noted_with_their_endpoint() -> None:
    merged = Answer(0.0, 1.0, [0.5, 1.0], 8, "usage", 8, None, None)
    records = (Record(PlannedRequest(0, (), 8, None), None, merged),)
    noted = CompareRun(0, parse_scenario("8x8@c1x1").loads[0], "b", records, summarise(records, 0.0))
    assert re.match(r"b: the server put 4\.00 tokens into an event.*\[8x8@c1x1\]", notes_of([noted])[0])


def test_a_latency_figure_has_a_rising_line_per_endpoint() -> None:
    samples = tuple(0.001 * (1 + number % 97) for number in range(500))
    svg = latency_figure([Series(0, samples), Series(1, samples[:50])])
    lines = [each.get("d", "") for each in ElementTree.fromstring(svg).iter() if each.get("clip-path")]
    (long,) = [line for line in lines if line.count("L") > 100]
    points = [tuple(map(float, point.split())) for point in long.strip()[1:].split("L")]
    assert all(a[0] <= b[0] and a[1] >= b[1] for a, b in pairwise(points)), "further right, not lower on the screen"
    assert all(PALETTE[colour] in svg for colour in (0, 1))


def test_a_timeline_has_a_lane_per_request_with_its_wait_and_its_tokens() -> None:
    late = Failure("timeout", "<never>")
    records = [record(0, 1.0, 4), record(1, 2.0, 3, sent_at_s=1.0), record(2, 2.0, 0, failure=late)]
    elements = list(ElementTree.fromstring(timeline_figure(records, endpoint=1, span_s=5.0)).iter())
    ours = [each for each in elements if PALETTE[1] in each.get("style", "")]
    assert len([each for each in ours if each.tag.endswith("path") and each.get("clip-path")]) == 3, "a wait each"
    assert len([each for each in ours if each.tag.endswith("use")]) == 4 + 3, "a tick per event"
    assert "failed: timeout" in [each.text for each in elements]
    assert first_token_samples(records) == (1.0, 2.0)
