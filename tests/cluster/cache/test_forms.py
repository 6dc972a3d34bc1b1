"""Cached equals fresh, to the bit, in small forms: split, pulled, hit, loaded from disk, found again after a kill."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.cluster.cache.test_mixed_forms import MODEL, Answer, answer_of, engine, go_on, is_near
from tests.cluster.cache.test_tiers import of_worker
from tests.cluster.processes import Client, running_cluster
from twostroke.config import CacheConfig, Role
from twostroke.config.cache import form_name
from twostroke.engine.backends.built import BuiltEngine
from twostroke.kv_cache.form import page_form
from twostroke.page_forms.page_form import PageShape

SMOLLM2 = PageShape(layers=30, kv_heads=3, block=16, head_dim=64)
PAGES, BLOCKS, OTHERS = 20, 6, 5
LENGTHS = (16 * BLOCKS, 16 * BLOCKS + 5)
"""The end of a block, where all of a prompt is cached, and the middle of one."""


def prompt(number: int, length: int) -> list[int]:
    return [504 + (31 * at + 977 * number) % 9000 for at in range(length)]


def fresh(built: BuiltEngine, length: int) -> Answer:
    return go_on(built, prompt(0, length), 0)


@pytest.mark.parametrize(
    ("form", "exact_layers", "prefill"),
    [*(pytest.param(form, 0, 0, marks=pytest.mark.slow) for form in ("int8", "int4")), ("int4", 2, 1)],
)
async def test_an_answer_is_the_same_wherever_its_pages_come_from(
    smollm2_dir: Path, tmp_path: Path, form: str, exact_layers: int, prefill: int
) -> None:
    """Without prefill workers what was evicted comes from disk; with one, it may be pulled as well."""
    cache = CacheConfig(
        kv_format=form,
        kv_exact_layers=exact_layers,
        kv_cache_memory_bytes=PAGES * page_form(form_name(form, exact_layers, "bfloat16")).page_bytes(SMOLLM2),
        disk_cache_bytes=256 << 20,
        disk_cache_dir=str(tmp_path),
    )
    with engine(Role.DECODE, cache, smollm2_dir) as (built, _):
        expected = [fresh(built, length) for length in LENGTHS]
    async with running_cluster(prefill=prefill, decode=1, model=MODEL, model_dir=smollm2_dir, cache=cache) as cluster:
        client = Client(cluster.grpc)

        async def check(whence: str) -> None:
            for length, answer in zip(LENGTHS, expected, strict=True):
                assert is_near(await answer_of(client, prompt(0, length)), answer), (whence, length)

        async def evict() -> None:
            for number in range(1, OTHERS + 1):
                await answer_of(client, prompt(number, LENGTHS[1]))

        await check("computed or pulled")
        await check("cached")
        await evict()
        await check("on disk")
        loaded = await asyncio.to_thread(of_worker, cluster, "decode-0", "loaded_pages_total")
        await evict()
        await cluster.kill("decode-0")
        await cluster.restart("decode-0")
        await check("found again")
        loaded += await asyncio.to_thread(of_worker, cluster, "decode-0", "loaded_pages_total")
        assert loaded > 0 or prefill, "nothing came from disk"
        failed = await asyncio.to_thread(of_worker, cluster, "decode-0", "verification_failures_total")
        assert failed == 0
        await client.close()
