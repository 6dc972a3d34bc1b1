"""Versions of adapters for a small random model, and what the model says with each of them merged into its weights."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.lora import random_tensors, write_adapter
from tests.merged import merged_model
from tests.trials.chaos.adapters.calls import ANSWER_TOKENS
from tests.trials.chaos.adapters.churn import Prompt, Stage
from twostroke.models.adapters.peft import read_adapter
from twostroke.models.adapters.shapes import ProjectionShapes
from twostroke.models.registry import read_spec

VOCABULARY: Final = 131
PROMPTS: Final = 6
LONGEST: Final = 150
SURE: Final = 1e-3
"""Prompts are drawn so that the two highest logits are further apart than this wherever a token is drawn."""
RANKS: Final = (1, 4, 7, 16)

Expected = dict[tuple[str, Prompt], tuple[int, ...]]


def small_model(folder: Path) -> Path:
    """Saves a random Llama of two layers with a tokenizer."""
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = {f"w{token}": token for token in range(VOCABULARY)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


def stage_of(model: Path, base: str, *, names: int, served: int, versions: int, folders: Path, seed: int) -> Stage:
    """Returns names and versions for a model that `small_model` saved."""
    shapes = ProjectionShapes.of(read_spec(model))
    writers: dict[str, Callable[[Path], object]] = {}
    for number, rank in zip(range(versions), itertools.cycle(RANKS), strict=False):
        tensors = random_tensors(shapes, rank=rank, seed=number)
        writers[f"v{number}"] = partial(write_adapter, tensors=tensors, r=rank)
    expected = _expected(model, base, writers, folders / ".merged", random.Random(seed))
    return Stage(base, [f"name{number}" for number in range(names)], served, writers, expected, folders)


def _expected(
    model: Path, base: str, writers: dict[str, Callable[[Path], object]], scratch: Path, draw: random.Random
) -> Expected:
    """Returns what each version says to some prompts, to which all of them are sure what to say."""
    torch.set_num_threads(1)
    computing = {base: AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()}
    for version, write in writers.items():
        write(scratch)
        computing[version] = merged_model(model, read_adapter(scratch))
    expected: Expected = {}
    while len(expected) < PROMPTS * len(computing):
        prompt = tuple(draw.choices(range(VOCABULARY), k=draw.randint(20, LONGEST)))
        answers = {version: _greedy(each, prompt) for version, each in computing.items()}
        sure = [answer for answer in answers.values() if answer is not None]
        if len(set(sure)) == len(computing):
            expected.update(((version, prompt), answer) for version, answer in zip(answers, sure, strict=True))
    return expected


def _greedy(model: Any, prompt: Prompt) -> tuple[int, ...] | None:
    """Returns the likeliest continuation; None where rounding may decide it."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(ANSWER_TOKENS):
            top = model(torch.tensor([tokens])).logits[0, -1].topk(2)
            first, second = top.values.tolist()
            if first - second < SURE:
                return None
            tokens.append(int(top.indices[0]))
    return tuple(tokens[len(prompt) :])
