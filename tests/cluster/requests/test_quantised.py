"""Quantised models behind real workers: the tokens of transformers, and one answer wherever it is computed.

In float32 codes are dequantised; in bfloat16 they are multiplied as files have them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, GptOssConfig, PreTrainedConfig, Qwen3MoeConfig

from tests.cluster.processes import Client, ProcessCluster, running_cluster
from tests.cluster.reference import Reference, continued, mismatches
from tests.cluster.requests.test_families import BLOCK, CHUNK, PAGES, answers_of, counted
from tests.unit.models.decoders.test_native_transformer import prompt
from tests.unit.models.family_configs import OSS
from tests.unit.models.test_registry import saved
from tests.unit.models.weights.stored.coded_models import FORMATS, quantised, with_expert_blocks
from tests.unit.models.weights.stored.gguf_models import SIZES, written
from twostroke.config import CacheConfig, ModelConfig, ScheduleConfig
from twostroke.models.registry import read_spec

LENGTHS = (3, 33, 64, 100)
MOE: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16}
MODELS: dict[str, PreTrainedConfig] = {
    "qwen3_moe, AWQ": Qwen3MoeConfig(**SIZES, **MOE, norm_topk_prob=True),
    "qwen3_moe, GGUF": Qwen3MoeConfig(**SIZES, **MOE, norm_topk_prob=True),
    "gpt_oss, MXFP4": GptOssConfig(**OSS | {"hidden_size": 64, "intermediate_size": 96}),
}


def saved_with_tokenizer(name: str, directory: Path) -> list[Reference]:
    """Saves a quantised model; returns prompts with the tokens that transformers continues them with."""
    config, same = MODELS[name], directory / "same numbers"
    if name.endswith("GGUF"):
        written(config, "qwen3moe", directory, meaning=same)
    else:
        saved(config, directory)
        meaning = with_expert_blocks(directory) if "MXFP4" in name else quantised(directory, FORMATS["AWQ"])
        config.save_pretrained(same)
        save_file({key: tensor.float().contiguous() for key, tensor in meaning.items()}, same / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(same, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    words = {f"w{token}": token for token in range(131)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(directory / "tokenizer.json"))
    return [continued(model, f"length {length}", prompt(length, seed=length).tolist()) for length in LENGTHS]


@asynccontextmanager
async def serving(directory: Path, dtype: str, ranks: int) -> AsyncIterator[tuple[ProcessCluster, Client]]:
    page_bytes = read_spec(directory).page_bytes(BLOCK, dtype)
    async with running_cluster(
        prefill=1,
        decode=2,
        model=ModelConfig(model=str(directory), dtype=dtype, tp=ranks),
        model_dir=directory,
        cache=CacheConfig(kv_cache_memory_bytes=PAGES * page_bytes),
        schedule=ScheduleConfig(max_num_seqs=8, max_num_batched_tokens=CHUNK, local_prefill=False),
        policy="round-robin",  # which always names the prefill worker, however cheap a small model is
    ) as cluster:
        client = Client(cluster.grpc)
        yield cluster, client
        await client.close()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), [*((name, 1) for name in MODELS), ("qwen3_moe, GGUF", 2)])
async def test_a_quantised_model_is_served_split(name: str, ranks: int, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    expected = saved_with_tokenizer(name, tmp_path)
    async with serving(tmp_path, "float32", ranks) as (cluster, client):
        assert mismatches(expected, await answers_of(client, expected)) == []
        assert counted(cluster, "twostroke_pull_bytes_total") > 0, "nothing was pulled: this was not a split run"
    async with serving(tmp_path, "bfloat16", ranks) as (cluster, client):
        together = await answers_of(client, expected)
        assert counted(cluster, "twostroke_pull_bytes_total") > 0
        for each in expected * 2:  # alone, by turns at both decode workers, with what each has cached
            assert await answers_of(client, [each]) == {each.name: together[each.name]}
