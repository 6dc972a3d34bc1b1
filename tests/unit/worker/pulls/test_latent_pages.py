"""Pages of latents of a small DeepSeek V2-Lite: one that was pulled has the bits of one that was computed."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import DeepseekV2Config

from tests.unit.models.family_configs import CONFIGS
from tests.unit.models.test_families import reference
from tests.unit.worker.callers import router_to
from tests.unit.worker.rig import BLOCK, Running, decode, prefill
from twostroke.config import ModelConfig, ScheduleConfig
from twostroke.kv_cache.block import block_hashes_of

PROMPT = tuple(3 + at * 37 % 120 for at in range(9 * BLOCK + 5))
HASHES = block_hashes_of(PROMPT, BLOCK)
LAYERS, RANK, ROPE = 3, 32, 8


def pages_of(worker: Running) -> list[bytes]:
    """Returns the bytes of the prompt's pages, which the worker has cached."""
    pages = [worker.host.pool.find(block_hash) for block_hash in HASHES]
    memory = worker.host.memory
    return [memory.regions[0][page].tobytes() for page in pages if page is not None]


def in_steps_of(tokens: int) -> ScheduleConfig:
    return ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=tokens)


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    config = CONFIGS["deepseek_v2, lite"]
    assert isinstance(config, DeepseekV2Config)
    assert (config.num_hidden_layers, config.kv_lora_rank, config.qk_rope_head_dim) == (LAYERS, RANK, ROPE)
    reference(config, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    return ModelConfig(model=str(tmp_path), dtype="bfloat16", deterministic=True, device="cpu")


async def test_pulled_pages_have_the_bits_of_the_source_and_of_another_worker_that_computes_them(
    model: ModelConfig,
) -> None:
    async with (
        prefill(model=model, schedule=in_steps_of(112)) as source,
        decode("pulling", model=model) as pulling,
        decode("alone", model=model, schedule=in_steps_of(23)) as alone,
        router_to(pulling) as router,
        router_to(alone) as other,
    ):
        split = await router.answer(PROMPT, 6, source=source)
        whole = await other.answer(PROMPT, 6)
        page_bytes = BLOCK * LAYERS * (RANK + ROPE) * 2
        assert pulling.metric("pull_bytes_total", transport="shm") == len(HASHES) * page_bytes
        assert alone.metric("pull_bytes_total", transport="shm") == 0
        computed = pages_of(source)
        assert [len(page) for page in computed] == [page_bytes] * len(HASHES)
        assert len(set(computed)) == len(HASHES)
        assert pages_of(pulling) == computed
        assert pages_of(alone) == computed
        assert split.tokens == whole.tokens
        for worker in (source, pulling, alone):
            await worker.idle()
