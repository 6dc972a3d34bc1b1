"""Which requests at which times: seeded, and sharing exactly what was asked for."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tools.bench.load import (
    PlannedRequest,
    Segment,
    Speller,
    Stream,
    constant_arrivals,
    poisson_arrivals,
    synthetic_plan,
    warmup_plan,
)
from tools.bench.options import BenchOptions
from tools.bench.session import plan_of

SPELLER = Speller(vocab_size=30000, seed=0)


def shared_tokens(one: list[int], other: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def plan_for(options: BenchOptions) -> list[PlannedRequest]:
    return synthetic_plan(options.prompts, [None] * options.pace.num_requests)


def test_poisson_gaps_have_mean_and_spread_of_the_rate() -> None:
    times = poisson_arrivals(rate=4.0, count=40_000, seed=1)
    gaps = np.diff([0.0, *times])
    assert all(earlier <= later for earlier, later in pairwise(times))
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.05)
    assert np.mean(gaps > 0.25) == pytest.approx(np.exp(-1), abs=0.01)  # exponential, not merely of that mean


def test_poisson_arrivals_follow_from_the_seed_alone() -> None:
    assert poisson_arrivals(2.0, 50, seed=3) == poisson_arrivals(2.0, 50, seed=3)
    assert poisson_arrivals(2.0, 50, seed=3) != poisson_arrivals(2.0, 50, seed=4)


def test_constant_arrivals_are_evenly_spaced() -> None:
    assert constant_arrivals(4.0, 4) == [0.0, 0.25, 0.5, 0.75]


def test_prompts_of_one_group_share_exactly_the_stated_tokens_and_of_two_groups_none(options: Any) -> None:
    chosen = options(
        "--num-requests", "60", "--prompt-tokens", "50", "--shared-prefix-tokens", "33", "--prefix-groups", "3"
    )
    plan = plan_for(chosen)
    spelled = [(request.prompt[0].number, SPELLER.token_ids(request.prompt)) for request in plan]
    assert {group for group, _ in spelled} == {0, 1, 2}
    for (group, one), (other_group, other) in combinations(spelled, 2):
        assert shared_tokens(one, other) == (33 if group == other_group else 0)


def test_prompts_without_a_shared_prefix_share_nothing_even_in_a_small_vocabulary(options: Any) -> None:
    plan = plan_for(options("--num-requests", "48", "--prompt-tokens", "20"))
    prompts = [Speller(vocab_size=64, seed=0).token_ids(request.prompt) for request in plan]
    assert all(shared_tokens(one, other) == 0 for one, other in combinations(prompts, 2))


def test_the_plan_and_its_tokens_follow_from_the_seed_alone(options: Any) -> None:
    flags = ("--num-requests", "20", "--prompt-spread", "0.5", "--shared-prefix-tokens", "16", "--prefix-groups", "4")
    first, again, other = (plan_for(options(*flags, "--seed", seed)) for seed in ("1", "1", "2"))
    assert first == again
    assert first != other
    prompt = first[0].prompt
    assert Speller(30000, 1).token_ids(prompt) == Speller(30000, 1).token_ids(prompt)
    assert Speller(30000, 1).token_ids(prompt) != Speller(30000, 2).token_ids(prompt)


def test_prompt_lengths_spread_over_the_whole_stated_range(options: Any) -> None:
    plan = plan_for(options("--num-requests", "2000", "--prompt-tokens", "100", "--prompt-spread", "0.2"))
    lengths = {request.prompt_tokens for request in plan}
    assert lengths == set(range(80, 121))
    assert all(len(SPELLER.token_ids(request.prompt)) == request.prompt_tokens for request in plan[:50])


def test_prompts_may_be_spread_nearly_from_nothing_to_twice_their_length(options: Any) -> None:
    plan = plan_for(options("--num-requests", "200", "--prompt-tokens", "100", "--prompt-spread", "0.999"))
    assert all(1 <= request.prompt_tokens <= 200 for request in plan)


@pytest.mark.parametrize("vocab_size", [16, 256, 30000])
def test_every_token_lies_in_the_vocabulary(vocab_size: int) -> None:
    speller = Speller(vocab_size, seed=0)
    for number in (0, 1, vocab_size, 10**9):
        ids = speller.token_ids((Segment(Stream.OWN, number, 500),))
        assert len(ids) == 500
        assert all(min(100, vocab_size // 4) <= token < vocab_size for token in ids)


def test_a_shorter_segment_is_the_start_of_the_longer_one() -> None:
    for tokens in (1, 7, 100, 511):
        whole = SPELLER.token_ids((Segment(Stream.BLOCK, 5, 512),))
        assert SPELLER.token_ids((Segment(Stream.BLOCK, 5, tokens),)) == whole[:tokens]


def test_text_has_one_word_per_token() -> None:
    prompt = (Segment(Stream.PREFIX, 0, 10), Segment(Stream.OWN, 3, 15))
    assert len(SPELLER.text(prompt).split(" ")) == 25


def test_warmup_prompts_are_as_long_as_the_planned_ones_but_share_nothing_with_them(options: Any) -> None:
    plan = plan_for(options("--num-requests", "5", "--prompt-tokens", "40", "--prompt-spread", "0.5"))
    warmup = warmup_plan(plan, 7)
    assert [request.prompt_tokens for request in warmup] == [plan[index % 5].prompt_tokens for index in range(7)]
    measured = [SPELLER.token_ids(request.prompt) for request in plan]
    assert all(shared_tokens(SPELLER.token_ids(w.prompt), prompt) == 0 for w in warmup for prompt in measured)


TRACE = [
    {"timestamp": 3000, "input_length": 1100, "output_length": 40, "hash_ids": [0, 1, 2]},
    {"timestamp": 3000, "input_length": 1024, "output_length": 1, "hash_ids": [0, 1]},
    {"timestamp": 9000, "input_length": 700, "output_length": 12, "hash_ids": [0, 9]},
    {"timestamp": 6000, "input_length": 512, "output_length": 12, "hash_ids": [9]},
]


@pytest.fixture
def trace_file(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in TRACE))
    return str(path)


def test_a_trace_keeps_its_lengths_times_and_sharing(options: Any, trace_file: str) -> None:
    plan = plan_of(options("--trace", trace_file))
    assert [request.prompt_tokens for request in plan] == [1100, 1024, 512, 700]
    assert [request.output_tokens for request in plan] == [40, 1, 12, 12]
    assert [request.due_s for request in plan] == [0.0, 0.0, 3.0, 6.0]  # by time, from the first row on
    ids = [SPELLER.token_ids(request.prompt) for request in plan]
    assert shared_tokens(ids[0], ids[1]) == 1024
    assert shared_tokens(ids[0], ids[3]) == 512
    assert shared_tokens(ids[0], ids[2]) == 0
    assert ids[3][512:] == ids[2][: 700 - 512]  # the same block further back, cut short


def test_a_trace_without_blocks_is_replayed_with_prompts_that_share_nothing(options: Any, tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,700,44\n2023-11-16 18:15:50.18,700,9\n"
    )
    one, other = plan_of(options("--trace", str(path)))
    assert (one.prompt_tokens, one.output_tokens, other.output_tokens, other.due_s) == (700, 44, 9, 3.5)
    assert shared_tokens(SPELLER.token_ids(one.prompt), SPELLER.token_ids(other.prompt)) == 0


def test_scales_shrink_times_lengths_and_blocks_alike(options: Any, trace_file: str) -> None:
    plan = plan_of(options("--trace", trace_file, "--trace-scale", "0.5", "--trace-length-scale", "0.125"))
    assert [request.due_s for request in plan] == [0.0, 0.0, 1.5, 3.0]
    assert [request.prompt_tokens for request in plan] == [138, 128, 64, 88]
    assert [request.output_tokens for request in plan] == [5, 1, 2, 2]
    ids = [SPELLER.token_ids(request.prompt) for request in plan]
    assert shared_tokens(ids[0], ids[1]) == 128
    assert shared_tokens(ids[0], ids[3]) == 64


def test_however_small_the_scale_prompts_and_answers_keep_a_token(options: Any, trace_file: str) -> None:
    plan = plan_of(options("--trace", trace_file, "--trace-length-scale", "0.0001"))
    assert [request.prompt_tokens for request in plan] == [3, 2, 1, 2]
    assert {request.output_tokens for request in plan} == {1}


def test_jitter_spreads_bursts_by_the_seed_and_stays_in_its_bounds(options: Any, trace_file: str) -> None:
    flags = ("--trace", trace_file, "--trace-jitter", "3")
    first, again, other = (plan_of(options(*flags, "--seed", seed)) for seed in ("1", "1", "2"))
    due_s = [request.due_s for request in first if request.due_s is not None]
    assert due_s == [request.due_s for request in again]
    assert due_s != [request.due_s for request in other]
    assert due_s == sorted(due_s)
    assert len(set(due_s)) == len(TRACE)
    assert all(0 <= due <= 9 for due in due_s)


def test_rate_and_concurrency_replace_the_times_of_a_trace(options: Any, trace_file: str) -> None:
    constant = plan_of(options("--trace", trace_file, "--rate", "2", "--arrivals", "constant"))
    assert [request.due_s for request in constant] == [0.0, 0.5, 1.0, 1.5]
    fixed = plan_of(options("--trace", trace_file, "--concurrency", "2"))
    assert [request.due_s for request in fixed] == [None] * 4


def test_the_rows_of_a_burst_stay_in_order(options: Any, trace_file: str) -> None:
    by_second = defaultdict(list)
    for request in plan_of(options("--trace", trace_file)):
        by_second[request.due_s].append(request.index)
    assert by_second[0.0] == [0, 1]
