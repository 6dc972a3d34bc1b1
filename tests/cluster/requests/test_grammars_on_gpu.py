"""Grammars where a GPU computes: masked rows are sampled on the device, and answers go on elsewhere as they would have.

A small random model, whose tokenizer is made here, so that the test needs no download.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.cluster.processes import Client, running_cluster
from tests.cluster.requests import test_grammars
from tests.cluster.requests.deaths import asked_until, kill_the_busiest
from tests.cluster.requests.test_exact_resume import Answers, ask
from tests.trials.chaos.neighbours.site import VOCABULARY, write_tokenizer
from twostroke.config import CacheConfig, ModelConfig, ScheduleConfig

PROMPT = list(range(40, 59))
"""Nineteen tokens: one full block and a tail."""


def write_model(directory: Path) -> None:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    write_tokenizer(directory)


async def ask_all(client: Client) -> Answers:
    modes = test_grammars.MODES
    answers = await asyncio.gather(*(ask(client, options, PROMPT) for options in modes.values()))
    return dict(zip(modes, answers, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
async def test_answers_match_their_grammars_on_a_device_whoever_decodes_them(tmp_path: Path) -> None:
    write_model(tmp_path)
    async with running_cluster(
        prefill=1,
        decode=2,
        model=ModelConfig(model=str(tmp_path), dtype="float32"),
        model_dir=tmp_path,
        cache=CacheConfig(kv_cache_memory_bytes=16 << 20),
        schedule=ScheduleConfig(max_num_seqs=32),
    ) as cluster:
        client = Client(cluster.grpc)
        expected = await ask_all(client)
        for mode, choices in expected.items():
            for said in choices.values():
                test_grammars.check(mode, said.text)
                assert said.finish == "stop"
        is_killed = asyncio.Event()
        asked = asyncio.ensure_future(asked_until(is_killed, lambda: ask_all(client)))
        await kill_the_busiest(cluster, {"decode-0", "decode-1"}, 30, asked)
        is_killed.set()
        for answers in await asked:
            assert {mode for mode in expected if answers[mode] != expected[mode]} == set()
        await client.close()
