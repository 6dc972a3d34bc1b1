"""Hashes of prompts: found again they are those that are computed anew, and only where the same salt made them."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest

from router.metrics import RouterMetrics
from router.serving import prompt_hashes
from router.serving.prompt_hashes import HASHED_BLOCKS, SPAN_BLOCKS, PromptHasher
from twostroke.kv_cache.block import block_hashes_of, derived_salt, exact_salt, owner_salt
from twostroke.request import GenerateRequest, SamplingParams

PARAMS = SamplingParams(seed=1, max_tokens=1)
SPAN = 16 * SPAN_BLOCKS


def request_of(prompt: tuple[int, ...], salt: bytes = b"", public_blocks: int = 0, tenant: str = "") -> GenerateRequest:
    return GenerateRequest(prompt=prompt, sampling=PARAMS, salt=salt, public_blocks=public_blocks, hint_tenant=tenant)


def reused(metrics: RouterMetrics) -> float:
    return metrics.registry.get_sample_value("twostroke_reused_block_hashes_total", {"role": "router"}) or 0.0


async def test_a_long_prompt_is_hashed_in_parts_with_others_in_between() -> None:
    prompt = tuple(range(6 * 16 * HASHED_BLOCKS + 7))
    for most_bytes in (0, 1 << 20):
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        counting = asyncio.create_task(count())
        hasher = PromptHasher(most_bytes, RouterMetrics())
        for _ in range(2):
            turns = 0
            hashes = await hasher.hashes(request_of(prompt, b"tenant"), 16)
            assert list(hashes) == block_hashes_of(prompt, 16, b"tenant")
            assert turns >= 4, "also where all of it is known"
        counting.cancel()


async def test_a_beginning_that_was_hashed_before_is_not_hashed_again() -> None:
    metrics = RouterMetrics()
    hasher = PromptHasher(1 << 20, metrics)
    first = tuple(range(3 * SPAN + 40))
    await hasher.hashes(request_of(first, b"s"), 16)
    assert reused(metrics) == 0
    longer = (*first[: 2 * SPAN + 5], *range(7, 2 * SPAN))
    assert list(await hasher.hashes(request_of(longer, b"s"), 16)) == block_hashes_of(longer, 16, b"s")
    assert reused(metrics) == 2 * SPAN_BLOCKS


async def test_whoever_has_another_salt_finds_no_hashes() -> None:
    """Every pair of tenant, salt of the client, adapter, form and public prefix is tried in both orders."""
    prompt = tuple(range(2 * SPAN))
    owners = [owner_salt(tenant, salt) for tenant in ("", "a", "b") for salt in (b"", b"x")]
    salts = [made for salt in owners for made in (salt, exact_salt(salt), derived_salt(salt, b"adapter", b"digest"))]
    kinds = [(salt, public) for salt in salts for public in (0, SPAN_BLOCKS // 2)]
    for one, other in itertools.permutations(kinds, 2):
        metrics = RouterMetrics()
        hasher = PromptHasher(1 << 20, metrics)
        await hasher.hashes(request_of(prompt, *one), 16)
        assert list(await hasher.hashes(request_of(prompt, *other), 16)) == block_hashes_of(prompt, 16, *other)
        assert reused(metrics) == 0


@pytest.mark.parametrize("seed", range(4))
async def test_hashes_are_those_of_all_tokens_whatever_was_hashed_before(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_hashes, "SPAN_BLOCKS", 3)
    draw = random.Random(seed)
    hasher = PromptHasher(20_000, RouterMetrics())
    prompts: list[tuple[int, ...]] = [()]
    for _ in range(150):
        before = draw.choice(prompts)
        prompt = (*before[: draw.randrange(len(before) + 1)], *(draw.randrange(3) for _ in range(draw.randrange(60))))
        prompts.append(prompt)
        salt, public, block_size = draw.choice([b"", b"a", b"b"]), draw.randrange(4), draw.choice([1, 4])
        hashes = await hasher.hashes(request_of(prompt, salt, public, draw.choice("ab")), block_size)
        assert list(hashes) == block_hashes_of(prompt, block_size, salt, public)


async def test_nothing_is_kept_where_nothing_may_be() -> None:
    metrics = RouterMetrics()
    hasher = PromptHasher(0, metrics)
    for _ in range(2):
        await hasher.hashes(request_of(tuple(range(3 * SPAN))), 16)
    assert reused(metrics) == 0
