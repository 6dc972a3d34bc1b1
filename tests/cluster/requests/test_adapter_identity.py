"""Adapters of a real model behind real workers in float32: the tokens of merged weights, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.cluster.processes import Client, ProcessCluster
from tests.cluster.reference import Reference, continued, mismatches
from tests.cluster.requests.deaths import asked_over_a_death
from tests.cluster.requests.test_families import CHUNK, counted, serving
from tests.lora import random_tensors, write_adapter
from tests.merged import merged_model
from tests.unit.models.decoders.test_native_transformer import prompt
from tests.unit.models.test_registry import SIZES, saved
from twostroke.models.adapters.peft import read_adapter
from twostroke.models.adapters.shapes import ProjectionShapes
from twostroke.models.registry import read_spec

BASE: Final = ""
"""The model alone: the name that a request has which names no model."""
ADAPTERS: Final[Mapping[str, dict[str, Any]]] = {
    "all": {"rank": 4},
    "some": {"rank": 7, "projections": ["q_proj", "v_proj", "down_proj"]},
}
LENGTHS: Final = (16, 33, 64, 100)
PAGES: Final = 16
"""Room for the longest prompt of two models, and not for the growing answers."""
GROWING: Final = 2
"""Short prompts with long answers of each model, which do not fit the pages of one decode worker together."""
GROWN_TOKENS: Final = 90
HITS: Final = "twostroke_prefix_cache_hits_total"

Models = dict[str, list[Reference]]


class Merged(NamedTuple):
    """A model with adapters, and what each says."""

    directory: Path
    folders: Mapping[str, Path]
    some: Models
    growing: Models


def with_adapters(directory: Path, to: Path) -> Merged:
    folders = write_adapters(directory, to)
    return Merged(directory, folders, *references(directory, folders))


@pytest.fixture(scope="module")
def merged_llama(tmp_path_factory: pytest.TempPathFactory) -> Merged:
    folder = tmp_path_factory.mktemp("adapters")
    return with_adapters(small_llama(folder / "llama"), folder)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("llama", (1, 1)),
        pytest.param("llama", (2, 1), marks=pytest.mark.slow),
        pytest.param("llama", (2, 2), marks=pytest.mark.slow),
        pytest.param("smollm2", (1, 1), marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
async def test_answers_with_an_adapter_are_those_of_merged_weights_through_hits_preemptions_and_deaths(
    name: str, ranks: tuple[int, int], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if name == "llama":
        merged: Merged = request.getfixturevalue("merged_llama")
    else:
        merged = with_adapters(request.getfixturevalue("smollm2_dir"), tmp_path)
    directory, folders, some, growing = merged
    async with serving(directory, PAGES, ranks, max_num_seqs=16, max_num_batched_tokens=CHUNK) as (cluster, client):
        await serve(cluster, folders)
        assert await wrong(client, some) == []
        assert counted(cluster, "twostroke_pull_bytes_total") > 0, "nothing was pulled: this was not a split run"
        hits = counted(cluster, HITS)
        for _ in range(3):  # by turns at both decode workers
            assert await wrong(client, {model: expected[-1:] for model, expected in some.items()}) == []
        assert counted(cluster, HITS) > hits
        assert await wrong(client, growing) == []
        assert counted(cluster, "twostroke_preemptions_total") > 0
        assert not any(await asked_over_a_death(cluster, lambda: wrong(client, growing)))
        await restart_all(cluster)
        after = Client(cluster.grpc)
        assert await wrong(after, {model: expected[-2:] for model, expected in some.items()}) == []
        await after.close()


async def test_a_prefix_of_the_base_is_never_used_for_an_adapter_nor_the_reverse(merged_llama: Merged) -> None:
    directory, folders, some, _ = merged_llama
    async with serving(directory, 4 * PAGES) as (cluster, client):
        await serve(cluster, folders)
        for number, order in enumerate((tuple(some), tuple(reversed(some)))):
            for model in order:
                hits = tokens_found(cluster)
                assert await wrong(client, {model: some[model][-1 - number :][:1]}) == []
                assert tokens_found(cluster) == hits, f"{model!r} was answered with pages of another model"
        for model, expected in some.items():
            hits = tokens_found(cluster)
            for _ in range(3):
                assert await wrong(client, {model: expected[-1:]}) == []
            assert tokens_found(cluster) > hits


def small_llama(directory: Path) -> Path:
    saved(LlamaConfig(**SIZES), directory)
    words = {f"w{token}": token for token in range(131)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(directory / "tokenizer.json"))
    return directory


def write_adapters(directory: Path, to: Path) -> dict[str, Path]:
    shapes = ProjectionShapes.of(read_spec(directory))
    return {
        name: write_adapter(to / name, random_tensors(shapes, seed=seed, **options), r=options["rank"])
        for seed, (name, options) in enumerate(ADAPTERS.items())
    }


def references(directory: Path, folders: Mapping[str, Path]) -> tuple[Models, Models]:
    """Returns the same prompts with the tokens of each model, and few whose answers are long."""
    torch.set_num_threads(1)
    some, growing = Models(), Models()
    for model in (BASE, *folders):
        if model == BASE:
            computes = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        else:
            computes = merged_model(directory, read_adapter(folders[model]))
        computes.generation_config.eos_token_id = None
        some[model] = [continued(computes, f"length {each}", prompt(each, seed=each).tolist()) for each in LENGTHS]
        few = [prompt(2 + number, seed=99 - number).tolist() for number in range(GROWING)]
        growing[model] = [continued(computes, f"growing {len(each)}", each, GROWN_TOKENS) for each in few]
    for same in list(zip(*some.values(), strict=True))[-2:]:
        assert len({each.answer for each in same}) == len(some), "to long prompts every model says something else"
    return some, growing


async def serve(cluster: ProcessCluster, folders: Mapping[str, Path]) -> None:
    for name, folder in folders.items():
        await cluster.name_adapter(name, read_adapter(folder), folder)


async def wrong(client: Client, expected: Models) -> list[str]:
    """Asks everything at once; returns the answers that are not those of their model."""

    async def ask(model: str, each: Reference) -> list[int]:
        options = {"max_tokens": len(each.answer), "temperature": 0, "ignore_eos": True}
        return await client.tokens(each.prompt, model=model, **options)

    async def answers(model: str, references: Sequence[Reference]) -> list[str]:
        tokens = await asyncio.gather(*(ask(model, each) for each in references))
        found = {each.name: answer for each, answer in zip(references, tokens, strict=True)}
        return [f"{model!r} {line}" for line in mismatches(list(references), found)]

    found = await asyncio.gather(*(answers(*each) for each in expected.items()))
    return [line for lines in found for line in lines]


def tokens_found(cluster: ProcessCluster) -> float:
    """Returns the tokens that workers of both roles found in their caches."""
    return sum(cluster.metric(worker, HITS) for worker in cluster.workers)


async def restart_all(cluster: ProcessCluster) -> None:
    """Ends every process, and starts others in their places."""
    for worker, known in cluster.workers.items():
        if known.process.returncode is None:
            await cluster.kill(worker)
    for worker in cluster.workers:
        await cluster.restart(worker)
    await cluster.restart_router()
