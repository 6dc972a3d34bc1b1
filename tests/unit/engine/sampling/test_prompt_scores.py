"""Logprobs of prompts: those of one forward pass over the whole prompt, however it is cut into steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.unit.engine.batches import Stream, step
from twostroke.config import ModelConfig
from twostroke.engine.backends.cpu.runner import ModelRunner, RunnerResources
from twostroke.engine.cores.cores import Cores
from twostroke.engine.sampling.prompt_scores import score_prompts
from twostroke.kernels.pools.page_pool import PagePool
from twostroke.kv_cache.form import FORMS
from twostroke.kv_cache.memory import PageMemory
from twostroke.models.registry import read_spec
from twostroke.request import PromptLogprobs, SamplingParams
from twostroke.scheduler.batch import ScoreRow

PAGES = 40
LENGTH = 80


@pytest.fixture(scope="module")
def runner(smollm2_dir: Path) -> Iterator[ModelRunner]:
    spec = read_spec(smollm2_dir)
    memory = PageMemory(PAGES, spec.page_bytes(16, "float32"))
    runner = ModelRunner(
        smollm2_dir,
        spec,
        memory,
        ModelConfig(dtype="float32", max_model_len=512),
        pool=PagePool.over(torch.from_numpy(memory.data), FORMS["float32"], spec.page_shape(16)),
        resources=RunnerResources(Cores((0,))),
        with_head=True,
    )
    yield runner
    runner.close()
    memory.close()


def prompt_of(length: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(length).integers(20, 49_000, length).tolist()
    return tokens


def scored(runner: ModelRunner, prompt: list[int], chunk: int, top: int) -> PromptLogprobs:
    stream = Stream(prompt, list(range(-(-len(prompt) // 16))))
    parts: list[PromptLogprobs] = []
    while stream.computed < len(prompt):
        start, count = stream.computed, min(chunk, len(prompt) - stream.computed)
        targets = tuple(prompt[start + 1 : start + count + 1])
        batch = step([(stream, count)])
        result = runner.run(replace(batch, scores=(ScoreRow(0, targets, top),) if targets else ()))
        parts += result.scores
        stream.computed += count
        assert len(result.tokens) == (stream.computed == len(prompt)), "samples are beside scores"
    return PromptLogprobs.joined(parts)


def test_they_are_those_of_transformers_over_the_whole_prompt(runner: ModelRunner, smollm2_dir: Path) -> None:
    prompt, top = prompt_of(LENGTH), 4
    model: Any = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    ours = scored(runner, prompt, 64, top)
    own = expected[range(LENGTH - 1), prompt[1:]]
    np.testing.assert_allclose(ours.logprobs, own.numpy(), atol=1e-3)
    ranks = (expected > own[:, None]).sum(-1) + 1
    differing = np.flatnonzero(np.array(ours.ordinals) != ranks.numpy())
    assert len(differing) < LENGTH / 5, "ranks differ only where others lie within rounding"
    values, ids = expected.topk(top)
    np.testing.assert_allclose(ours.top_logprobs, values.flatten().numpy(), atol=1e-3)
    assert np.mean(np.array(ours.top_ids) == ids.flatten().numpy()) > 0.98


@pytest.mark.parametrize(("length", "chunk"), [(12, 1), (50, 17), (50, 48)])
def test_chunking_changes_nothing_but_rounding(runner: ModelRunner, length: int, chunk: int) -> None:
    prompt = prompt_of(length)
    whole, cut = scored(runner, prompt, length, 2), scored(runner, prompt, chunk, 2)
    assert len(cut) == length - 1
    np.testing.assert_allclose(cut.logprobs, whole.logprobs, atol=1e-3)
    np.testing.assert_allclose(cut.top_logprobs, whole.top_logprobs, atol=1e-3)


def test_they_equal_logprobs_of_the_same_tokens_when_drawn(runner: ModelRunner) -> None:
    prompt, params = prompt_of(20), SamplingParams(seed=0, max_tokens=9, temperature=0, logprobs=3)
    stream, drawn = Stream(list(prompt), list(range(3)), params=params), []
    while len(drawn) < 6:
        count = len(stream.tokens) - stream.computed
        (token,) = runner.run(step([(stream, count)])).tokens
        stream.computed += count
        stream.tokens.append(token.token)
        drawn.append(token)
    scores = scored(runner, list(stream.tokens), 512, 3)
    np.testing.assert_allclose(scores.logprobs[-6:], [token.logprob for token in drawn], atol=1e-3)
    assert list(scores.ordinals[-6:]) == [1] * 6
    assert [[token for token, _ in scores.top(place)] for place in range(19, 25)] == [
        [token for token, _ in each.top] for each in drawn
    ]


def test_of_equal_logits_the_lowest_ids_come_first_and_share_a_rank() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0]])
    (scores,) = score_prompts(logits, [ScoreRow(0, (4,), 2)])
    assert list(scores.top_ids) == [1, 2]
    assert list(scores.ordinals) == [1]
    assert scores.logprobs[0] == scores.top_logprobs[0]


def test_a_row_does_not_depend_on_the_rows_around_it() -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(60, 500, generator=draw).bfloat16()
    targets = tuple(torch.randint(0, 500, (60,), generator=draw).tolist())
    (together,) = score_prompts(logits, [ScoreRow(0, targets, 5)])
    alone = score_prompts(logits, [ScoreRow(row, (target,), 5) for row, target in enumerate(targets)])
    assert PromptLogprobs.joined(alone) == together


def test_no_more_than_the_vocabulary_is_told() -> None:
    (scores,) = score_prompts(torch.zeros(1, 3), [ScoreRow(0, (0,), 20)])
    assert scores.top(0) == [(token, scores.logprobs[0]) for token in range(3)]
