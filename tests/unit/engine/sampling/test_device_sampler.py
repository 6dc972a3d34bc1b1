"""Draws that a device proposes: token for token the sampler's, or left to it."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from twostroke.base.token_mask import WORD_BITS, Mask, permitted
from twostroke.engine.sampling.device_sampler import WITHOUT_NOISE, draw_rows
from twostroke.engine.sampling.noise import gumbel, gumbel_rows, stream_of
from twostroke.engine.sampling.sampler import is_unadjusted, sample
from twostroke.request import SamplingParams
from twostroke.scheduler.batch import SampleRow

VOCAB = 4000

TRUNCATIONS: list[dict[str, float]] = [
    {},
    {"top_p": 0.9},
    {"top_p": 0.5},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 300},
    {"top_k": 600},
    {"min_p": 0.05},
    {"min_p": 0.02, "top_p": 0.8},
    {"top_k": 40, "top_p": 0.95},
    {"top_k": 5000, "top_p": 0.7},
    {"top_k": 30, "min_p": 0.01, "top_p": 0.9},
]


def row(seed: int, **params: float) -> SampleRow:
    settings = {"seed": seed, "max_tokens": 1000, "temperature": 0.8, **params}
    return SampleRow(0, SamplingParams(**settings), position=seed % 100)  # type: ignore[arg-type]  # of the test's own keys


def compare(logits: torch.Tensor, rows: list[SampleRow]) -> int:
    """How many rows were decided; each must be the sampler's token."""
    drawn = draw_rows(logits, rows)
    expected = sample(logits, rows)
    decided = [(mine, right) for mine, right in zip(drawn, expected, strict=True) if mine is not None]
    assert all(mine == right for mine, right in decided)
    return len(decided)


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peaked_rows_are_drawn_as_the_sampler_draws_them(truncation: dict[str, float], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    count = 24
    logits = (torch.randn(count, VOCAB) * 3).to(dtype)
    rows = [row(seed, **truncation, temperature=0.3 + seed / count) for seed in range(count)]
    decided = compare(logits, rows)
    if truncation.get("top_k", 0) < WITHOUT_NOISE:
        assert decided >= count * 0.75, "the sampler on the host would be the bottleneck"


def test_rows_of_many_kinds_in_one_step() -> None:
    draw = random.Random(2)
    torch.manual_seed(2)
    rows = [row(seed, **draw.choice(TRUNCATIONS), choice=seed % 3) for seed in range(60)]
    assert compare(torch.randn(60, VOCAB) * 4, rows) > 45


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_ties_and_flat_rows_are_never_decided_wrongly(truncation: dict[str, float]) -> None:
    torch.manual_seed(3)
    flat = torch.zeros(1, VOCAB)
    coarse = torch.randint(0, 3, (1, VOCAB)).float()
    steep = torch.full((1, VOCAB), -50.0)
    steep[0, 17] = 50.0
    tiny_steps = torch.arange(VOCAB)[None] * 1e-7
    for logits in (flat, coarse, steep, tiny_steps):
        compare(logits.expand(5, -1), [row(seed, **truncation) for seed in range(5)])


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_a_vocabulary_smaller_than_the_proposals_is_always_decided(truncation: dict[str, float]) -> None:
    torch.manual_seed(4)
    rows = [row(seed, **truncation) for seed in range(8)]
    small = torch.randn(8, 14)
    assert compare(small, rows) == 8


def test_a_device_that_computes_a_little_differently_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's logarithms and exponentials differ in the last bits."""
    torch.manual_seed(5)

    def rounded_otherwise(streams: torch.Tensor, count: int) -> torch.Tensor:
        noise = gumbel_rows(streams, count)
        return noise * (1 + (torch.rand(noise.shape) - 0.5) * 1e-6)

    monkeypatch.setattr("twostroke.engine.sampling.device_sampler.gumbel_rows", rounded_otherwise)
    assert compare(torch.randn(40, VOCAB) * 2, [row(seed) for seed in range(40)]) >= 38


def test_noise_of_rows_is_the_noise_of_each() -> None:
    keys = [(1, 0, 7), (2**64 - 1, 3, 0), (12345, 0, 100_000)]
    together = gumbel_rows(torch.tensor([stream_of(*key) for key in keys]), 500)
    for index, key in enumerate(keys):
        assert torch.equal(together[index], gumbel(*key, torch.arange(500)))


def permitting(few: int, seed: int) -> Mask:
    """A mask of so many tokens."""
    bits = np.zeros(-(-VOCAB // WORD_BITS) * WORD_BITS, np.uint8)
    bits[np.random.default_rng(seed).permutation(VOCAB)[:few]] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


@pytest.mark.parametrize("kind", [{"temperature": 0}, *TRUNCATIONS], ids=str)
@pytest.mark.parametrize("few", [0, 1, 2, 15, 200, 600, VOCAB])
def test_masked_rows_are_drawn_as_the_sampler_draws_them(kind: dict[str, float], few: int) -> None:
    torch.manual_seed(6)
    count = 12
    rows = [row(seed, **kind)._replace(mask=permitting(few, seed) if seed % 4 else None) for seed in range(count)]
    decided = compare((torch.randn(count, VOCAB) * 3).bfloat16(), rows)
    if few and kind.get("top_k", 0) < WITHOUT_NOISE:
        assert decided >= count * 0.75


def test_banned_tokens_of_a_masked_row_are_not_drawn_while_there_are_others() -> None:
    mask = permitting(2, seed=1)
    first, second = permitted(mask, VOCAB).tolist()
    logits = torch.zeros(3, VOCAB)
    logits[:, first] = 9.0
    rows = [row(1, temperature=0)._replace(mask=mask, banned=banned) for banned in ((), (first,), (first, second))]
    assert [None if token is None else token.token for token in draw_rows(logits, rows)] == [first, second, None]
    assert compare(logits, rows) == 2


def test_rows_whose_permitted_logits_are_infinite_are_left_to_the_sampler() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, permitted(permitting(5, seed=3), VOCAB)] = -torch.inf
    for kind in ({}, {"temperature": 0}, {"top_p": 0.5}):
        assert (
            draw_rows(logits, [row(seed, **kind)._replace(mask=permitting(5, seed=3)) for seed in (1, 2)]) == [None] * 2
        )


def test_only_rows_that_ask_for_a_token_alone_are_unadjusted() -> None:
    assert is_unadjusted(row(1, top_p=0.5))
    assert is_unadjusted(row(1, temperature=0))
    assert is_unadjusted(row(1)._replace(banned=(2,), mask=permitting(5, seed=1)))
    assert not is_unadjusted(row(1, logprobs=0))
    assert not is_unadjusted(row(1, frequency_penalty=0.5))
    assert not is_unadjusted(row(1)._replace(banned=(2,)))
