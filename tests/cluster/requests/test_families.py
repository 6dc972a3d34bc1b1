"""Models of each family behind real workers in float32: the tokens of transformers, whatever happens on the way.

Each small model passes one cluster's days in turn: split with odd chunks, warm, preempted, and with a decode worker
killed under it.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from tests.cluster.lent import forget_cached
from tests.cluster.processes import Client, ProcessCluster, running_cluster
from tests.cluster.reference import Reference, continued, mismatches
from tests.cluster.requests.deaths import asked_over_a_death
from tests.unit.models.decoders.test_native_transformer import prompt
from tests.unit.models.family_configs import CONFIGS
from tests.unit.models.test_families import reference
from twostroke.config import CacheConfig, ModelConfig, ScheduleConfig
from twostroke.kv_cache.form import FORMS
from twostroke.kv_cache.windows.pool_share import SharedPool
from twostroke.models.catalog.places import locate
from twostroke.models.registry import read_spec

BLOCK: Final = 16
LENGTHS: Final = (3, 16, 33, 64, 100)
GROWING: Final = 6
"""Short prompts with long answers, which do not fit the pages of one decode worker together."""
GROWN_TOKENS: Final = 80
PAGES: Final = 16
HOST_BYTES: Final = 4 << 20
"""Host memory below the pages of models whose layers with a window keep their parts of blocks apart."""
CHUNK: Final = 37
WITH_EXPERTS: Final = ("moe", "mixtral", "gpt_oss", "deepseek")
IN_GATE: Final = ("deepseek_v3",)
"""It has MLPs, experts and latents. Windows and two ropes are tried by `test_ranks.py`, the others outside."""


def saved_with_tokenizer(
    name: str,
    directory: Path,
    *,
    some: tuple[int, ...] = LENGTHS,
    growing: int = GROWING,
    grown_tokens: int = GROWN_TOKENS,
) -> list[Reference]:
    """Saves a model; returns prompts with the tokens that transformers continues them with, of which the last grow."""
    torch.set_num_threads(1)
    model = reference(CONFIGS[name], directory)
    if "long_factor" in (CONFIGS[name].to_dict().get("rope_parameters") or {}):
        model = with_long_factors(CONFIGS[name], directory)
    model.generation_config.eos_token_id = None
    words = {f"w{token}": token for token in range(131)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(directory / "tokenizer.json"))
    answers = [continued(model, f"length {length}", prompt(length, seed=length).tolist()) for length in some]
    few = [prompt(2 + number, seed=99 - number).tolist() for number in range(growing)]
    return answers + [continued(model, f"growing {len(each)}", each, grown_tokens) for each in few]


def with_long_factors(config: PreTrainedConfig, directory: Path) -> Any:
    """Returns the model with longrope's second numbers from the first token on, as the served length asks for."""
    other = copy.deepcopy(config)
    other.rope_parameters["short_factor"] = other.rope_parameters["long_factor"]
    return AutoModelForCausalLM.from_pretrained(directory, config=other)


def memory_of(directory: Path, pages: int) -> int:
    """Returns the bytes of memory that holds so many blocks, and of their window parts what the share says."""
    spec = read_spec(directory)
    sizes = tuple(map(FORMS["float32"].page_bytes, spec.page_shapes(BLOCK, spec.page_groups)))
    if len(sizes) == 1:
        return pages * sizes[0]
    longest = spec.max_position_embeddings
    pool = SharedPool(
        window=spec.page_groups[-1].window, page_sizes=sizes, block_size=BLOCK, longest=longest, step_tokens=CHUNK
    )
    memory_bytes = pages * sizes[0] + round(pages * pool.share) * sizes[1]
    assert pool.layout(memory_bytes).regions[0].pages == pages
    return memory_bytes


@asynccontextmanager
async def serving(
    directory: Path, pages: int, ranks: tuple[int, int] = (1, 1), **schedule: int
) -> AsyncIterator[tuple[ProcessCluster, Client]]:
    prefill_tp, decode_tp = ranks
    async with running_cluster(
        prefill=1,
        decode=2,
        model=ModelConfig(model=str(directory), dtype="float32", prefill_tp=prefill_tp, decode_tp=decode_tp),
        model_dir=directory,
        cache=CacheConfig(
            kv_cache_memory_bytes=memory_of(directory, pages),
            host_cache_bytes=HOST_BYTES if len(read_spec(directory).page_groups) > 1 else 0,
        ),
        schedule=ScheduleConfig(**schedule, local_prefill=False),
        policy="round-robin",  # which always names the prefill worker, however cheap a small model is
    ) as cluster:
        client = Client(cluster.grpc)
        yield cluster, client
        await client.close()


async def answers_of(client: Client, expected: list[Reference]) -> dict[str, list[int]]:
    async def ask(each: Reference) -> list[int]:
        return await client.tokens(each.prompt, max_tokens=len(each.answer), temperature=0, ignore_eos=True)

    answers = await asyncio.gather(*map(ask, expected))
    return {each.name: answer for each, answer in zip(expected, answers, strict=True)}


def counted(cluster: ProcessCluster, name: str) -> float:
    """Returns a metric's sum over the decode workers."""
    return sum(cluster.metric(f"decode-{rank}", name) for rank in (0, 1))


@pytest.mark.parametrize(
    "name", [name if name in IN_GATE else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]
)
async def test_every_family_has_the_tokens_of_transformers_through_hits_preemptions_and_deaths(
    name: str, tmp_path: Path
) -> None:
    expected = saved_with_tokenizer(name, tmp_path)
    counts_experts = any(part in name for part in WITH_EXPERTS) and "whole dense" not in name
    await tokens_are_kept(tmp_path, expected, counts_experts=counts_experts)


async def tokens_are_kept(
    directory: Path,
    expected: list[Reference],
    *,
    counts_experts: bool = False,
    ranks: tuple[int, int] = (1, 1),
    pages: int = PAGES,
) -> None:
    """Expects the answers, of which the first are some and the others grow, whatever happens on the way.

    `ranks`: those of the prefill worker, and of each decode worker.
    """
    some, growing = expected[: len(LENGTHS)], expected[len(LENGTHS) :]
    async with serving(directory, pages, ranks, max_num_seqs=16, max_num_batched_tokens=CHUNK) as (cluster, client):
        assert mismatches(some, await answers_of(client, some)) == []
        assert counted(cluster, "twostroke_pull_bytes_total") > 0, "nothing was pulled: this was not a split run"
        assert (counted(cluster, "twostroke_expert_tokens_total") > 0) == counts_experts
        hits = counted(cluster, "twostroke_prefix_cache_hits_total")
        for _ in range(3):  # by turns at both decode workers
            assert mismatches(some[-1:], await answers_of(client, some[-1:])) == []
        assert counted(cluster, "twostroke_prefix_cache_hits_total") > hits
        assert mismatches(expected, await answers_of(client, expected)) == []
        assert counted(cluster, "twostroke_preemptions_total") > 0
        rounds = await asked_over_a_death(cluster, lambda: answers_of(client, growing))
        assert not [wrong for answers in rounds if (wrong := mismatches(growing, answers))]


ROUNDED: Final = 2e-4
"""Most by which keys and values that are rounded to bfloat16 change a logprob here; those that were lost change it by
a hundred times as much."""


def logprobs_of_next(directory: Path, prompts: list[list[int]]) -> list[tuple[int, float]]:
    """Returns the token that transformers finds the most likely after each prompt, and its logprob."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        logits = [model(torch.tensor([each])).logits[0, -1].log_softmax(-1) for each in prompts]
    return [(int(each.argmax()), float(each.max())) for each in logits]


@pytest.mark.slow
async def test_window_parts_that_were_converted_answer_as_those_of_transformers(tmp_path: Path) -> None:
    saved_with_tokenizer("gemma3", tmp_path, some=(), growing=0)
    prompts = [prompt(length, seed=length).tolist() for length in LENGTHS]
    expected = logprobs_of_next(tmp_path, prompts)
    async with running_cluster(
        prefill=1,
        decode=1,
        model=ModelConfig(model=str(tmp_path), dtype="float32"),
        model_dir=tmp_path,
        cache=CacheConfig(kv_cache_memory_bytes=8 << 20, decode_kv_format="bfloat16"),
        schedule=ScheduleConfig(local_prefill=False),
        policy="round-robin",
    ) as cluster:
        client = Client(cluster.grpc)
        streams = [client.stream(each, max_tokens=1, temperature=0, logprobs=0, ignore_eos=True) for each in prompts]
        found = [(each.token_id, each.logprob) for stream in streams async for got in stream for each in got.logprobs]
        await client.close()
        converted = sum(cluster.metric(each, "twostroke_converted_pages_total") for each in ("prefill-0", "decode-0"))
    assert converted > sum(length // BLOCK for length in LENGTHS), "pages and window parts were converted"
    for (token, logprob), (right, right_logprob) in zip(found, expected, strict=True):
        assert token == right
        assert abs(logprob - right_logprob) < ROUNDED


@pytest.mark.slow
async def test_prompts_are_scored_as_transformers_scores_them_where_window_parts_lie_apart(tmp_path: Path) -> None:
    saved_with_tokenizer("gemma3", tmp_path, some=(), growing=0)
    prompts = [prompt(length, seed=length).tolist() for length in LENGTHS]
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        expected = [
            model(torch.tensor([each])).logits[0, :-1].log_softmax(-1)[range(len(each) - 1), each[1:]]
            for each in prompts
        ]
    async with serving(tmp_path, PAGES, max_num_seqs=16, max_num_batched_tokens=CHUNK) as (cluster, client):

        async def score(each: list[int]) -> list[float]:
            stream = client.stream(each, max_tokens=1, temperature=0, prompt_logprobs=0, ignore_eos=True)
            return [one.logprob async for got in stream for one in got.prompt_logprobs]

        for each in prompts:
            await client.tokens(each, max_tokens=1, temperature=0)  # from there on its blocks are cached
        for turn in range(2):
            for found, right in zip(await asyncio.gather(*map(score, prompts)), expected, strict=True):
                torch.testing.assert_close(torch.tensor(found), right, atol=ROUNDED, rtol=0)
            if not turn:
                await cluster.kill("decode-0")


@pytest.mark.slow
async def test_window_parts_of_4_bits_answer_alike_pulled_warm_and_computed(tmp_path: Path) -> None:
    saved_with_tokenizer("gemma3", tmp_path, some=(), growing=0)
    prompts = [prompt(length, seed=length).tolist() for length in LENGTHS]
    async with running_cluster(
        prefill=1,
        decode=1,
        model=ModelConfig(model=str(tmp_path), dtype="float32", deterministic=True),
        model_dir=tmp_path,
        cache=CacheConfig(kv_cache_memory_bytes=8 << 20, kv_format="int4", host_cache_bytes=HOST_BYTES),
        schedule=ScheduleConfig(max_num_batched_tokens=CHUNK, max_num_seqs=16),
        policy="round-robin",
    ) as cluster:
        client = Client(cluster.grpc)

        async def ask(each: list[int]) -> list[tuple[int, float]]:
            stream = client.stream(each, max_tokens=8, temperature=0, logprobs=0, ignore_eos=True)
            return [(one.token_id, one.logprob) async for got in stream for one in got.logprobs]

        pulled = await asyncio.gather(*map(ask, prompts))
        assert cluster.metric("decode-0", "twostroke_pull_bytes_total") > 0
        assert await asyncio.gather(*map(ask, prompts)) == pulled, "warm"
        assert cluster.metric("decode-0", "twostroke_prefix_cache_hits_total") > 0
        await forget_cached(cluster)  # before the death, of which the router may hear late
        await cluster.kill("prefill-0")
        hits = cluster.metric("decode-0", "twostroke_prefix_cache_hits_total")
        assert await asyncio.gather(*map(ask, prompts)) == pulled, "computed by the decode worker"
        assert cluster.metric("decode-0", "twostroke_prefix_cache_hits_total") == hits
        await client.close()


GEMMA_LENGTHS: Final = (1, 16, 100, 300, 500, 511, 512, 513, 528, 600, 777, 1000, 1200, 1500, 1777, 2000)
"""Lengths of prompts around the window of 512 tokens and far beyond it."""
TEXT: Final = Path(__file__).parents[3] / "docs" / "architecture.md"


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_gemma_3_has_the_tokens_of_transformers_beyond_its_window() -> None:
    directory = locate("gemma3-270m", "float32")
    if directory is None:
        pytest.skip("fetch it first: twostroke model pull gemma3-270m --dtype float32")
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    text = tokenizer(TEXT.read_text(encoding="utf-8"))["input_ids"]
    prompts = {length: [2, *text[length : 2 * length - 1]] for length in GEMMA_LENGTHS}
    expected = [continued(model, f"length {length}", each) for length, each in prompts.items()]
    del model
    async with serving(directory, 600) as (cluster, client):
        assert mismatches(expected, await answers_of(client, expected)) == []
        assert counted(cluster, "twostroke_pull_bytes_total") > 0
        hits = counted(cluster, "twostroke_prefix_cache_hits_total")
        assert mismatches(expected, await answers_of(client, expected)) == []
        assert counted(cluster, "twostroke_prefix_cache_hits_total") > hits
        rounds = await asked_over_a_death(cluster, lambda: answers_of(client, expected))
        assert not [wrong for answers in rounds if (wrong := mismatches(expected, answers))]
