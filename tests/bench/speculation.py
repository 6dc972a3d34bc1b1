"""`python -m tests.bench speculation`: time per output token with speculation, beside the same requests without.

Two clusters of a prefill and a decode worker each serve the same model, one with `--speculate off`. The same requests
go to them in turns, so that a machine that is busy for a while is busy for both. Each cluster owns its cores as if it
were alone. No worker borrows cores: whether that pays is tried out, with another result in each cluster where the
machine is busy now and then. Answers are compared, too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from unittest.mock import patch

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from cluster.flags.checks import file_can_be_made
from tests.bench.options import json_file
from tests.cluster.processes import Client, ProcessCluster, running_cluster
from tools.output import write_json
from tools.tables import console_for, table_of, text_grid, text_row
from twostroke.config import (
    DEFAULT_MODEL,
    DRAFTER_NAMES,
    SPECULATE_AUTO,
    SPECULATE_OFF,
    CacheConfig,
    ModelConfig,
    ScheduleConfig,
    flags,
)
from twostroke.config.settings import Settings, group, setting
from twostroke.models.catalog.fetch import fetch

TOKEN_IDS = range(1000, 30000)
"""Random prompts are drawn from these: ordinary tokens of the default model."""
POOL_BYTES = 256 << 20
COUNTED = ("drafted", "kept")
"""Tokens that the cluster with speculation counts."""


class SpeculationBenchOptions(Settings):
    model: str = setting(DEFAULT_MODEL, help="as `serve --model`, in bfloat16")
    speculate: str = setting(SPECULATE_AUTO, choices=(SPECULATE_AUTO, *DRAFTER_NAMES), help="as `serve --speculate`")
    draft_model: str | None = setting(None, unit="MODEL", help="as `serve --draft-model`", default_text="none")
    output_tokens: int = setting(128, least=2, help="length of outputs")
    rounds: int = setting(5, least=1, help="rounds of each load, after one that is not measured")
    json_path: str | None = json_file()

    def model_post_init(self, _context: object) -> None:
        file_can_be_made("--json", self.json_path)


class _Flags(Settings):
    options: SpeculationBenchOptions = group(SpeculationBenchOptions, "speculation")


Prompts = Callable[[PreTrainedTokenizerBase, random.Random], list[int]]


@dataclass(frozen=True, slots=True)
class Load:
    name: str
    prompt: Prompts
    at_once: int = 1
    temperature: float = 0.0


@dataclass(slots=True)
class Measured:
    with_it: list[float] = field(default_factory=list)
    """Seconds per output token of each round."""
    without: list[float] = field(default_factory=list)
    is_equal: bool = True
    drafted: float = 0
    kept: float = 0
    """Tokens that were drafted, and those of them that were right, in all rounds."""

    @property
    def ratio(self) -> float:
        return statistics.median(self.with_it) / statistics.median(self.without)


def _code(first: int) -> str:
    """Source text of six functions, numbered from `first` on."""
    numbers = range(first, first + 6)
    return "".join(f"def area_{n}(width, height):\n    return width * height + {n}\n\n" for n in numbers)


def _edit(tokenizer: PreTrainedTokenizerBase, draws: random.Random) -> list[int]:
    """A prompt whose answer repeats it; new in every round."""
    code = _code(draws.randrange(100, 900))
    asked = [{"role": "user", "content": f"Repeat this code, and add a comment to each function:\n{code}"}]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(str(text) + code[:40])["input_ids"])


def _again(tokenizer: PreTrainedTokenizerBase, draws: random.Random) -> list[int]:
    """The same question in every round, as agents ask it."""
    asked = [{"role": "user", "content": "List the steps to release a new version of a Python package."}]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(str(text))["input_ids"])


WRITTEN = (
    "a binary search tree with insert, search and delete",
    "a queue of jobs that are run by several threads",
    "a parser of comma-separated values with quoted fields",
    "a cache that forgets what was used least recently",
    "a matrix with addition, multiplication and transposition",
    "a graph with breadth-first search and shortest paths",
)


def _code_to_write(tokenizer: PreTrainedTokenizerBase, draws: random.Random) -> list[int]:
    """A prompt whose answer is code that it does not hold."""
    asked = [{"role": "user", "content": f"Write a Python class for {draws.choice(WRITTEN)}."}]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(str(text))["input_ids"])


def _noise(tokenizer: PreTrainedTokenizerBase, draws: random.Random) -> list[int]:
    return draws.choices(TOKEN_IDS, k=64)


LOADS = (
    Load("edit, one at once", _edit),
    Load("the same again, one at once", _again),
    Load("code to write, one at once", _code_to_write),
    Load("random text, one at once", _noise, temperature=1.0),
    Load("random text, 16 at once", _noise, at_once=16, temperature=1.0),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, _Flags)


def run(args: argparse.Namespace) -> int:
    """0, or 1 where an answer differs. Raises ServeError for bad flags."""
    options = flags.read(_Flags, args).options
    results = asyncio.run(_measure(options))
    rows = [
        text_row(
            (
                name,
                f"{1e3 * statistics.median(each.without):.2f}",
                f"{1e3 * statistics.median(each.with_it):.2f}",
                f"{each.ratio:.3f}",
                f"{each.drafted:.0f}",
                f"{each.kept:.0f}",
                "equal" if each.is_equal else "DIFFERENT",
            )
        )
        for name, each in results.items()
    ]
    console = console_for(options.json_path)
    grid = text_grid(
        ("load", "off, ms per token", f"{options.speculate}, ms per token", "ratio", *COUNTED, "answers"), rows
    )
    console.print(table_of(grid, f"{options.model}, {options.rounds} rounds"))
    write_json({name: {**asdict(each), "ratio": each.ratio} for name, each in results.items()}, options.json_path)
    return 0 if all(each.is_equal for each in results.values()) else 1


async def _measure(options: SpeculationBenchOptions) -> dict[str, Measured]:
    directory = fetch(options.model, "bfloat16", lambda stage, part: None)
    if options.draft_model is not None:
        fetch(options.draft_model, "bfloat16", lambda stage, part: None)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory)
    results = {load.name: Measured() for load in LOADS}
    async with contextlib.AsyncExitStack() as stack:
        clients: dict[str, Client] = {}
        for speculate in (SPECULATE_OFF, options.speculate):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            stack.enter_context(patch.dict(os.environ, XDG_RUNTIME_DIR=folder))
            cluster = await stack.enter_async_context(
                running_cluster(
                    prefill=1,
                    decode=1,
                    model=ModelConfig(model=options.model),
                    model_dir=directory,
                    cache=CacheConfig(kv_cache_memory_bytes=POOL_BYTES),
                    schedule=_schedule(options, speculate),
                    borrow=False,
                )
            )
            clients[speculate] = Client(cluster.grpc)
            stack.push_async_callback(clients[speculate].close)
        for load, number in itertools.product(LOADS, range(options.rounds + 1)):
            before = _counted(cluster)
            prompts = [load.prompt(tokenizer, random.Random(f"{number} {n}")) for n in range(load.at_once)]
            answers, seconds = [], {}
            for speculate, client in sorted(clients.items(), reverse=number % 2 == 0):
                seconds[speculate], said = await _round(client, load, prompts, options.output_tokens)
                answers.append(said)
            measured = results[load.name]
            measured.is_equal &= answers[0] == answers[1]
            if number:
                measured.without.append(seconds[SPECULATE_OFF])
                measured.with_it.append(seconds[options.speculate])
            drafted, kept = (now - then for now, then in zip(_counted(cluster), before, strict=True))
            measured.drafted, measured.kept = measured.drafted + drafted, measured.kept + kept
    return results


def _schedule(options: SpeculationBenchOptions, speculate: str) -> ScheduleConfig:
    draft_model = None if speculate == SPECULATE_OFF else options.draft_model
    return ScheduleConfig(speculate=speculate, draft_model=draft_model)


def _counted(cluster: ProcessCluster) -> list[float]:
    return [cluster.metric("decode-0", f"twostroke_speculation_{name}_tokens_total") for name in COUNTED]


async def _round(client: Client, load: Load, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
    """Return the mean seconds per output token after the first, and the answers."""

    async def ask(seed: int, prompt: list[int]) -> tuple[float, list[int]]:
        answer, first_s = list[int](), 0.0
        wanted = {"max_tokens": tokens, "ignore_eos": True, "temperature": load.temperature, "seed": seed}
        async for response in client.stream(prompt, **wanted):
            first_s = first_s or time.perf_counter()
            answer += response.token_ids
        return (time.perf_counter() - first_s) / (len(answer) - 1), answer

    asked = await asyncio.gather(*(ask(seed, prompt) for seed, prompt in enumerate(prompts)))
    return statistics.mean(seconds for seconds, _ in asked), [answer for _, answer in asked]
