"""What the sampler promises: OpenAI's and vLLM's meanings, and no dependence on the batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.base.token_mask import Mask
from twostroke.engine.sampling.noise import gumbel
from twostroke.engine.sampling.sampler import sample, truncated
from twostroke.request import SampledToken, SamplingParams
from twostroke.scheduler.batch import SampleRow

VOCAB = 600


def row(position: int = 5, *, banned: tuple[int, ...] = (), history: Any = ((), ()), **params: Any) -> SampleRow:
    prompt, output = history
    values = {"seed": 1, "max_tokens": 9, **params}
    return SampleRow(0, SamplingParams(**values), position, banned=banned, prompt=prompt, output=output)


def one(logits: torch.Tensor, sample_row: SampleRow) -> SampledToken:
    return sample(logits[None], [sample_row])[0]


def random_logits(seed: int, rows: int | None = None) -> torch.Tensor:
    shape = (VOCAB,) if rows is None else (rows, VOCAB)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3


def drawn(logits: torch.Tensor, count: int = 300, **params: Any) -> set[int]:
    return {one(logits, row(position, **params)).token for position in range(count)}


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.zeros(VOCAB)
    logits[[40, 17, 300]] = 2.0
    assert one(logits, row(temperature=0)).token == 17
    assert one(logits, row(temperature=0, logprobs=0)).token == 17
    assert one(logits, row(temperature=1e-9)).token == 17


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 50), st.integers(0, 2**64 - 1), st.integers(0, 3), st.floats(0.2, 1), st.integers(1, 40))
def test_a_draw_is_the_same_alone_and_in_any_batch(seed: int, key: int, choice: int, top_p: float, top_k: int) -> None:
    logits = random_logits(seed, rows=4)
    rows = [
        row(9, seed=key, choice=choice),
        row(9, seed=key, choice=choice, top_p=top_p, top_k=top_k),
        row(9, temperature=0),
        row(10, seed=key, min_p=0.1),
    ]
    together = sample(logits, rows)
    assert list(together) == [one(logits[i], rows[i]) for i in range(4)]
    assert list(reversed(sample(logits.flip(0), rows[::-1]))) == list(together)


NAN, INFINITY = math.nan, math.inf


@pytest.mark.parametrize("corrupt", [[NAN], [INFINITY], [-INFINITY] * VOCAB, [NAN, INFINITY], [INFINITY, -INFINITY]])
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 0, "logprobs": 3},
        {},
        {"top_p": 0.9},
        {"top_k": 5, "min_p": 0.1},
        {"repetition_penalty": 1.5, "history": ((0, 1), (2,))},
    ],
    ids=str,
)
def test_a_row_without_finite_logits_has_no_token_and_its_neighbours_have_theirs(
    corrupt: list[float], params: dict[str, Any]
) -> None:
    logits = random_logits(4, rows=3)
    rows = [row(9, top_p=0.8), row(9, **params), row(9, temperature=0, logprobs=2)]
    before = sample(logits, rows)
    assert all(token.is_sound for token in before)
    logits[1, : len(corrupt)] = torch.tensor(corrupt)
    after = sample(logits, rows)
    assert not after[1].is_sound
    assert (after[0], after[2]) == (before[0], before[2])


def test_logits_that_overflow_when_they_are_divided_by_the_temperature_have_no_token() -> None:
    logits = random_logits(4)
    logits[7] = 1e38
    assert one(logits, row(temperature=1.0)).token == 7
    assert not one(logits, row(temperature=0.01)).is_sound
    assert not one(-logits.abs() * INFINITY, row()).is_sound


def test_tokens_that_the_model_excludes_with_minus_infinity_do_not_make_a_row_unsound() -> None:
    logits = torch.full((VOCAB,), -INFINITY)
    logits[[5, 9]] = 1.0
    history = ((1, 5), (9,))
    for params in ({}, {"temperature": 0}, {"top_p": 0.5}, {"min_p": 0.2}, {"repetition_penalty": 1.5}):
        token = one(logits, row(history=history, **params))
        assert token.is_sound
        assert token.token in (5, 9)


def test_seed_choice_and_position_each_change_the_draw() -> None:
    logits = torch.zeros(VOCAB)
    draws = [
        [one(logits, row(position, seed=seed, choice=choice)).token for position in range(20)]
        for seed, choice in ((1, 0), (2, 0), (1, 1), (1 << 40, 0))
    ]
    assert len({tuple(tokens) for tokens in draws}) == 4
    assert all(len(set(tokens)) > 10 for tokens in draws)


def test_draws_follow_the_softmax() -> None:
    weights = torch.tensor([0.5, 0.25, 0.15, 0.1])
    count = 4000
    tokens = [one(weights.log(), row(position)).token for position in range(count)]
    frequencies = torch.bincount(torch.tensor(tokens), minlength=4) / count
    torch.testing.assert_close(frequencies, weights, rtol=0, atol=0.03)


def test_temperature_sharpens() -> None:
    weights = torch.tensor([0.6, 0.4]).log()
    cold = [one(weights, row(position, temperature=0.1)).token for position in range(200)]
    hot = [one(weights, row(position, temperature=50.0)).token for position in range(200)]
    assert cold.count(0) > 185
    assert 60 < hot.count(0) < 140


def test_noise_is_a_function_of_the_token_id_alone() -> None:
    everything = gumbel(7, 0, 3, torch.arange(VOCAB))
    some = torch.tensor([599, 4, 77])
    assert torch.equal(gumbel(7, 0, 3, some), everything[some])


GOLDEN, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


def unmixed(z: int) -> int:
    """What SplitMix64's finaliser makes `z` of."""
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        whole = z
        for _ in range(64 // shift):
            whole = z ^ (whole >> shift)
        z = whole * pow(factor, -1, 1 << 64) & MASK
    return z


def seed_of(mixed: int, position: int, token: int) -> int:
    """The seed whose noise for choice 0, this position and this token begins with the 64 bits `mixed`."""
    stream = (unmixed(mixed) - token * GOLDEN) & MASK
    state = (unmixed(stream) - GOLDEN & MASK) ^ position
    state = unmixed(state) - GOLDEN & MASK
    return unmixed(state) - GOLDEN & MASK


@pytest.mark.parametrize("mixed", [MASK, MASK - (1 << 38), 0, 1 << 11])
def test_noise_of_the_greatest_and_least_numbers_is_finite_and_a_banned_token_never_wins(mixed: int) -> None:
    position, token = 3, 17
    seed = seed_of(mixed, position, token)
    noise = gumbel(seed, 0, position, torch.arange(VOCAB))
    assert noise.isfinite().all()
    assert (noise[token] == (noise.min() if mixed else noise.max())) or mixed == 1 << 11
    logits = torch.full((VOCAB,), -math.inf)
    logits[token] = 0.0
    assert one(logits, row(position, seed=seed)).token == token
    banned = tuple(other for other in range(VOCAB) if other != token)
    assert one(torch.zeros(VOCAB), row(position, seed=seed, banned=banned)).token == token


def test_noise_is_gumbel() -> None:
    noise = gumbel(123, 0, 0, torch.arange(200_000)).double()
    assert noise.isfinite().all()
    assert abs(float(noise.mean()) - 0.5772) < 0.01
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.02


def test_top_k_keeps_the_k_likeliest() -> None:
    logits = random_logits(1) / 10
    assert drawn(logits, top_k=5) == set(logits.topk(5).indices.tolist())
    assert drawn(logits, 20, top_k=1) == {int(logits.argmax())}
    assert len(drawn(logits, 50, top_k=10_000)) > 30


def test_equals_at_the_edge_are_ranked_by_id() -> None:
    logits = torch.zeros(VOCAB)
    logits[[9, 4, 30]] = 1.0
    assert drawn(logits, 20, top_k=1) == {4}
    assert drawn(logits, 60, top_k=2) == {4, 9}
    assert drawn(logits, 20, top_p=1e-6) == {4}


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9])
def test_top_p_keeps_the_smallest_set_that_reaches_p(top_p: float) -> None:
    logits = random_logits(2)
    order = logits.argsort(descending=True)
    mass = logits.softmax(0)[order].cumsum(0)
    nucleus = set(order[: int((mass < top_p).sum()) + 1].tolist())
    tokens = drawn(logits, 600, top_p=top_p, temperature=1.0)
    assert tokens <= nucleus
    assert int(order[0]) in tokens


def test_top_p_over_a_flat_vocabulary_keeps_its_likelier_half() -> None:
    tokens = drawn(torch.linspace(0, 0.01, 5000), 400, top_p=0.5)
    assert 2490 <= min(tokens) < 2700
    assert max(tokens) > 4800


def test_top_p_counts_within_top_k() -> None:
    weights = torch.tensor([0.3, 0.25, 0.2, 0.15, 0.1]).log()
    assert drawn(weights, top_k=2, top_p=0.53) == {0}


def test_min_p_drops_what_is_much_less_likely_than_the_best() -> None:
    weights = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert drawn(weights, min_p=0.2) == {0, 1, 2}


def test_banned_ids_are_never_drawn() -> None:
    logits = random_logits(3)
    best = int(logits.argmax())
    assert one(logits, row(temperature=0, banned=(best,))).token == int(logits.topk(2).indices[1])
    weights = torch.zeros(3)
    assert drawn(weights, banned=(1,)) == {0, 2}


def test_logit_bias_moves_logits() -> None:
    logits = random_logits(4)
    assert one(logits, row(temperature=0, logit_bias=((11, 100.0),))).token == 11
    best = int(logits.argmax())
    assert one(logits, row(temperature=0, logit_bias=((best, -100.0),))).token != best


def test_presence_and_frequency_penalties_count_the_answer_only() -> None:
    logits = torch.tensor([1.0, 0.9, 0.5, 0.0])
    answer = ((0, 0, 0), (1, 1, 0))
    chosen = one(logits, row(temperature=0, presence_penalty=0.3, frequency_penalty=0.2, history=answer, logprobs=4))
    expected = torch.tensor([1.0 - 0.3 - 0.2, 0.9 - 0.3 - 0.4, 0.5, 0.0])
    assert dict(chosen.top) == pytest.approx(dict(enumerate(expected.log_softmax(0).tolist())), abs=1e-6)
    assert chosen.token == 0


def test_repetition_penalty_counts_prompt_and_answer() -> None:
    logits = torch.tensor([2.0, -1.0, 1.5, 0.5])
    chosen = one(logits, row(temperature=0, repetition_penalty=2.0, history=((0, 1), (0,)), logprobs=4))
    expected = torch.tensor([1.0, -2.0, 1.5, 0.5])
    assert chosen.token == 2
    assert dict(chosen.top) == pytest.approx(dict(enumerate(expected.log_softmax(0).tolist())), abs=1e-6)


def test_logprobs_are_those_before_temperature_and_truncation() -> None:
    logits = random_logits(5)
    expected = logits.log_softmax(0)
    chosen = one(logits, row(temperature=0.3, top_k=2, logprobs=3))
    assert chosen.logprob == pytest.approx(float(expected[chosen.token]))
    assert [token for token, _ in chosen.top] == expected.topk(3).indices.tolist()
    assert one(logits, row(logprobs=0)).top == ()
    assert one(logits, row()).logprob is None


def test_equals_among_the_logprobs_are_ranked_by_id() -> None:
    logits = torch.zeros(VOCAB)
    logits[[400, 20]] = 1.0
    top = one(logits, row(temperature=0, logprobs=5)).top
    assert [token for token, _ in top] == [20, 400, 0, 1, 2]
    assert [token for token, _ in one(logits, row(logprobs=20)).top][:2] == [20, 400]


def test_a_biased_row_leaves_its_neighbours_logits_alone() -> None:
    logits = random_logits(6, rows=2)
    before = logits.clone()
    sample(logits, [row(logit_bias=((1, 5.0),), banned=(2,)), row(logprobs=1)])
    assert torch.equal(logits, before)


# Grammars


def mask_of(*tokens: int) -> Mask:
    bits = np.zeros(-(-VOCAB // 32) * 32, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def masked(mask: Mask, position: int = 5, *, banned: tuple[int, ...] = (), **params: Any) -> SampleRow:
    return row(position, banned=banned, **params)._replace(mask=mask)


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_k": 1}, {"top_p": 0.1}, {"min_p": 0.9}])
def test_tokens_that_a_grammar_does_not_permit_are_no_candidates(params: dict[str, Any]) -> None:
    """They are gone before truncation: what it keeps is the likeliest of those that may come."""
    logits = random_logits(1)
    allowed = [3, 77, 300, 599]
    greatest = max(allowed, key=lambda token: float(logits[token]))
    drawn_tokens = {one(logits, masked(mask_of(*allowed), position, **params)).token for position in range(200)}
    assert drawn_tokens <= set(allowed)
    assert drawn_tokens == {greatest} if params else len(drawn_tokens) > 1


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_k": 1, "temperature": 2}])
@pytest.mark.parametrize("logit", [-math.inf, -1e30, 5.0])
def test_a_token_that_alone_may_come_is_drawn_whatever_its_logit(params: dict[str, Any], logit: float) -> None:
    logits = random_logits(2)
    logits[41] = logit
    for position in range(50):
        assert one(logits, masked(mask_of(41), position, **params)) == SampledToken(41)
        assert one(logits, masked(mask_of(41), position, banned=(41,), **params)) == SampledToken(41)
        biased = masked(mask_of(41), position, logit_bias=((41, -100.0),), **params)
        assert one(logits, biased) == SampledToken(41)


def test_a_draw_under_a_mask_is_the_draw_without_it_where_all_may_come() -> None:
    logits = random_logits(3)
    whole = mask_of(*range(VOCAB))
    for params in ({}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.05}, {"presence_penalty": 1.0}, {"temperature": 0}):
        for position in range(30):
            assert one(logits, masked(whole, position, **params)) == one(logits, row(position, **params))


def test_logprobs_are_those_before_the_mask() -> None:
    logits = random_logits(4)
    best = int(logits.argmax())
    with_mask = one(logits, masked(mask_of(7, 8), temperature=0, logprobs=2))
    without = one(logits, row(temperature=0, logprobs=2))
    assert with_mask.token in {7, 8}
    assert with_mask.top == without.top
    assert with_mask.top[0][0] == best
    assert with_mask.logprob == pytest.approx(float(logits.log_softmax(-1)[with_mask.token]))


def test_banned_tokens_come_under_a_mask_only_where_nothing_else_may() -> None:
    logits = torch.zeros(VOCAB)
    logits[7] = 5.0
    assert one(logits, masked(mask_of(7, 8), banned=(7,), temperature=0)).token == 8
    assert one(logits, masked(mask_of(7, 8), banned=(7, 8), temperature=0)).token == 7


def test_a_mask_that_permits_nothing_gives_no_token_and_harms_no_neighbour() -> None:
    logits = random_logits(5, rows=2)
    failed, sound = sample(logits, [masked(mask_of()), row()])
    assert not failed.is_sound
    assert sound == one(logits[1], row())


def test_the_last_candidate_that_truncation_leaves_is_drawn_whatever_its_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise reaches minus infinity with a chance of 2^-25."""
    monkeypatch.setattr(
        "twostroke.engine.sampling.sampler.gumbel", lambda *args: torch.full((len(args[3]),), -math.inf)
    )
    logits = random_logits(6)
    assert one(logits, row(top_k=1)) == SampledToken(int(logits.argmax()))


def test_logprobs_of_named_tokens_are_those_of_the_whole_vocabulary_whatever_is_allowed() -> None:
    logits = random_logits(3)
    wanted = (7, 500, 0)
    named = row(logprobs=5, logprob_token_ids=wanted)._replace(mask=mask_of(11, 40))
    token = one(logits, named)
    logprobs = logits.log_softmax(-1)
    assert token.token in (11, 40)
    assert token.logprob == pytest.approx(float(logprobs[token.token]))
    assert token.top == tuple((other, pytest.approx(float(logprobs[other]))) for other in wanted)
    assert one(logits, named._replace(params=row().params)).token == token.token


def test_every_token_of_a_large_vocabulary_has_noise_of_its_own() -> None:
    """More tokens than 16 bits can count, in one and the same draw."""
    tokens = torch.arange(1 << 18)
    noise = gumbel(7, 0, 3, tokens)
    assert len(noise.unique()) > 0.95 * len(noise), "equal ones are chance"
    assert torch.equal(gumbel(7, 0, 3, tokens[1 << 17 :]), noise[1 << 17 :])


@pytest.mark.parametrize("params", [{}, {"top_k": 9}, {"min_p": 0.01}, {"top_p": 0.9}])
def test_with_a_grammar_a_token_has_the_noise_that_it_has_without_one(params: dict[str, Any]) -> None:
    """So the token that is drawn is the greatest of those that are permitted, by the noise of the whole vocabulary."""
    permitted = np.arange(3, VOCAB, 7)
    mask: Mask = np.packbits(np.isin(np.arange(640), permitted), bitorder="little").view(np.uint32)
    for position in range(40):
        logits = random_logits(position)
        kept = permitted[truncated(logits.numpy()[permitted], SamplingParams(seed=1, max_tokens=9, **params))]
        noisy = logits[kept] + gumbel(1, 0, position, torch.from_numpy(kept))
        assert one(logits, row(position, **params)._replace(mask=mask)).token == kept[int(noisy.argmax())]


def test_the_nucleus_has_the_token_that_reaches_its_share_and_none_behind_it() -> None:
    logits = np.log(np.array([0.125, 0.5, 0.25, 0.125], np.float32))

    def kept(top_p: float) -> list[int]:
        return sorted(truncated(logits, SamplingParams(seed=1, max_tokens=9, top_p=top_p)).tolist())

    assert [kept(top_p) for top_p in (0.01, 0.49, 0.51, 0.74, 0.76, 0.99)] == [
        [1], [1], [1, 2], [1, 2], [0, 1, 2], [0, 1, 2, 3],
    ]  # fmt: skip
