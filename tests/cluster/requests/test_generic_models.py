"""Models that transformers' own code computes, behind real workers in float32: the tokens of transformers alone.

Weights are small and random, the tokenizer is that of a real model. Each model is served split with odd chunks, warm,
preempted, and with a decode worker killed under it, as models of our families are.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from transformers import AutoTokenizer

from tests.cluster.forked import preloading
from tests.cluster.reference import CHATS, Reference, continued
from tests.cluster.requests.test_families import LENGTHS, tokens_are_kept
from tests.unit.models.generic_configs import GENERIC
from tests.unit.models.test_registry import saved

IN_GATE: Final = ("opt",)
"""It has what is rarest: learned positions with an offset, scores that the model scales itself."""
GROWING: Final = 4
GROWN_TOKENS: Final = 80
PAGES: Final = 9
"""Room for the longest prompt with its answer, and not for two answers that grow."""
ALSO: Final = (
    *(f"twostroke.models.generic.{name}" for name in ("checkpoint", "paged_model", "probe")),
    *(f"transformers.models.{name}.modeling_{name}" for name in IN_GATE),
)
"""What each worker of a generic model loads."""
TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="module", autouse=True)
def preloaded() -> Iterator[None]:
    with preloading(*ALSO):
        yield


def saved_with_real_tokenizer(name: str, tokenizer_dir: Path, directory: Path) -> list[Reference]:
    """Saves a model; returns prompts with the tokens that transformers continues them with."""
    torch.set_num_threads(1)
    for file in TOKENIZER_FILES:
        if (tokenizer_dir / file).exists():
            shutil.copy(tokenizer_dir / file, directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    config = copy.deepcopy(GENERIC[name])
    config.vocab_size = len(tokenizer)
    config._attn_implementation = "eager"
    model = saved(config, directory)
    model.generation_config.eos_token_id = None
    some = [continued(model, f"length {length}", words(tokenizer, length, length)) for length in LENGTHS]
    few = [words(tokenizer, 2 + number, 7 * number) for number in range(GROWING)]
    return some + [continued(model, f"growing {len(each)}", each, GROWN_TOKENS) for each in few]


def words(tokenizer: Any, length: int, first: int) -> list[int]:
    """Returns tokens of ordinary text; texts with another `first` word begin otherwise."""
    text = " ".join(CHATS).split()
    encoded = tokenizer(" ".join(text[first % len(text) :] + text), add_special_tokens=False)
    tokens: list[int] = list(encoded["input_ids"])[:length]
    assert len(tokens) == length
    return tokens


@pytest.mark.parametrize(
    "name", [name if name in IN_GATE else pytest.param(name, marks=pytest.mark.slow) for name in GENERIC]
)
async def test_a_model_without_a_file_of_ours_has_the_tokens_of_transformers(
    name: str, smollm2_dir: Path, tmp_path: Path
) -> None:
    await tokens_are_kept(tmp_path, saved_with_real_tokenizer(name, smollm2_dir, tmp_path), pages=PAGES)
