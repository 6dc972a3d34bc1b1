"""The default model on the CPU: the same tokens as transformers, however prompts are cut and steps are shared."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.unit.engine.batches import Stream, generate, step
from twostroke.base.ids import PageId
from twostroke.config import ModelConfig
from twostroke.engine.backends.cpu.runner import ModelRunner, RunnerResources
from twostroke.engine.cores.cores import Cores
from twostroke.kernels.pools.page_pool import PagePool
from twostroke.kv_cache.form import FORMS
from twostroke.kv_cache.memory import PageMemory
from twostroke.models.registry import read_spec
from twostroke.request import SamplingParams

PAGES = 160
ANSWER = 12


@pytest.fixture(scope="module")
def memory(smollm2_dir: Path) -> Iterator[PageMemory]:
    memory = PageMemory(PAGES, read_spec(smollm2_dir).page_bytes(16, "float32"))
    yield memory
    memory.close()


@pytest.fixture(scope="module")
def runner(smollm2_dir: Path, memory: PageMemory) -> Iterator[ModelRunner]:
    runner = make_runner(smollm2_dir, memory, with_head=True)
    yield runner
    runner.close()


def make_runner(directory: Path, memory: PageMemory, *, with_head: bool) -> ModelRunner:
    return ModelRunner(
        directory,
        read_spec(directory),
        memory,
        ModelConfig(dtype="float32", max_model_len=2048),
        pool=PagePool.over(torch.from_numpy(memory.data), FORMS["float32"], read_spec(directory).page_shape(16)),
        resources=RunnerResources(Cores((0,))),
        with_head=with_head,
    )


@pytest.fixture(scope="module")
def reference(smollm2_dir: Path) -> Any:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


def greedy(reference: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    answer = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    tokens: list[int] = answer[0, len(prompt) :].tolist()
    return tokens


@pytest.fixture(scope="module")
def answer_of(reference: Any) -> Callable[[int], list[int]]:
    """The greedy tokens after the prompt of a length, computed once for all chunks."""
    return functools.cache(lambda length: greedy(reference, prompt_of(length), ANSWER))


def prompt_of(length: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(length).integers(20, 49_000, length).tolist()
    return tokens


def pages_for(tokens: int, seed: int = 0) -> list[int]:
    pages: list[int] = np.random.default_rng(seed).permutation(PAGES)[: -(-tokens // 16)].tolist()
    return pages


CHUNKED = tuple(itertools.product((1, 2, 15, 16, 17, 31, 32, 33, 100, 400), (7, 512)))
"""Tokens of prompts, and of their chunks."""
IN_GATE = ((16, 7), (33, 512))


@pytest.mark.parametrize(
    ("length", "chunk"), [pytest.param(*each, marks=() if each in IN_GATE else pytest.mark.slow) for each in CHUNKED]
)
def test_greedy_tokens_equal_transformers(
    runner: ModelRunner, answer_of: Callable[[int], list[int]], length: int, chunk: int
) -> None:
    stream = Stream(prompt_of(length), pages_for(length + ANSWER))
    assert generate(runner, stream, ANSWER, chunk) == answer_of(length)


def test_greedy_tokens_of_a_chat_equal_transformers(runner: ModelRunner, reference: Any, smollm2_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    stream = Stream(list(prompt), pages_for(len(prompt) + ANSWER))
    answer = generate(runner, stream, ANSWER, 512)
    assert answer == greedy(reference, prompt, ANSWER)
    assert "Paris" in tokenizer.decode(answer)


def test_logits_equal_transformers_closely(runner: ModelRunner, reference: Any) -> None:
    prompt = prompt_of(50)
    stream = Stream(prompt, pages_for(50))
    logits = runner.logits(step([(stream, 50)]))
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[:, -1]
    assert logits is not None
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=3e-4)


def test_a_mixed_step_gives_each_sequence_what_it_gets_alone(runner: ModelRunner) -> None:
    lengths = (40, 3, 70)
    alone = [generate(runner, Stream(prompt_of(n), pages_for(n + 4)), 4, 512) for n in lengths]
    free = iter(range(PAGES))
    streams = [Stream(prompt_of(n), [next(free) for _ in range(-(-(n + 4) // 16))]) for n in lengths]
    answers: list[list[int]] = [[] for _ in streams]
    starts_at = (0, 2, 3)
    for tick in range(9):
        active = [i for i in range(len(streams)) if tick >= starts_at[i] and len(answers[i]) < 4]
        work = [(streams[i], min(24, len(streams[i].tokens) - streams[i].computed)) for i in active]
        batch = step(work)
        result = runner.run(batch)
        for stream, count in work:
            stream.computed += count
        for row, sampled in zip(batch.samples, result.tokens, strict=True):
            answers[active[row.row]].append(sampled.token)
            streams[active[row.row]].tokens.append(sampled.token)
    assert answers == alone


def test_the_last_token_can_be_computed_again_into_the_scratch_page(runner: ModelRunner) -> None:
    prompt = prompt_of(32)
    pages = pages_for(33)
    expected = generate(runner, Stream(prompt.copy(), pages), 1, 512)
    again = step([(Stream(prompt, pages, computed=31), 1)])
    scratch = np.array([PAGES * 16], np.int64)
    object.__setattr__(again, "write_slots", scratch)
    assert [sampled.token for sampled in runner.run(again).tokens] == expected


def test_seeded_samples_do_not_depend_on_the_batch(runner: ModelRunner) -> None:
    def stream(seed: int, pages: list[int]) -> Stream:
        return Stream(prompt_of(20), pages, params=SamplingParams(seed=seed, max_tokens=9, temperature=1.0))

    alone = [runner.run(step([(stream(seed, [0, 1]), 20)])).tokens[0] for seed in range(8)]
    together = runner.run(step([(stream(seed, [2 * seed, 2 * seed + 1]), 20) for seed in range(8)])).tokens
    assert list(together) == alone
    assert len(set(together)) > 1


def test_a_runner_without_head_fills_pages_that_another_goes_on_from(
    smollm2_dir: Path, runner: ModelRunner, memory: PageMemory
) -> None:
    prompt = prompt_of(40)
    expected = generate(runner, Stream(prompt.copy(), [0, 1, 2]), 4, 512)
    source = PageMemory(4, memory.page_bytes)
    headless = make_runner(smollm2_dir, source, with_head=False)
    assert headless.run(step([(Stream(prompt, [2, 0, 3]), 32)])).tokens == ()
    memory.page(PageId(5))[:] = source.page(PageId(2))
    memory.page(PageId(6))[:] = source.page(PageId(0))
    headless.close()
    source.close()
    assert generate(runner, Stream(prompt.copy(), [5, 6, 7], computed=32), 4, 512) == expected
