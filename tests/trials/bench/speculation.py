"""`python -m tests.trials.bench speculation`: time per output token with speculation, beside the same requests without.

Two clusters of a prefill and a decode worker each serve the same model, one with `--speculate off`. The same requests
go to them in turns, so that a machine that is busy for a while is busy for both. Each cluster owns its cores as if it
were alone. No worker borrows cores: whether that pays is tried out, with another result in each cluster where the
machine is busy now and then. Answers are compared, too.

Beside each measured ratio stands what `twostroke simulate` predicts from the costs of steps that the worker has fitted,
and from how often its drafted tokens were right at each place. A draft model's own time is not simulated.
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
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from cluster.flags.checks import file_can_be_made
from router.fleet.worker import step_cost
from tests.cluster.processes import Client, ProcessCluster, running_cluster
from tests.trials.bench.options import json_file
from tests.trials.bench.simulated_speculation import CalibratedFleet, DraftCounts, simulated_token_s
from tools.output import write_json
from tools.tables import console_for, table_of, text_grid, text_row
from twostroke.base.errors import ConfigError
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
from twostroke.rpc.v1.control_pb2 import Load

TOKEN_IDS = range(1000, 30000)
"""Random prompts are drawn from these: ordinary tokens of the default model."""
POOL_BYTES = 256 << 20


class SpeculationBenchOptions(Settings):
    model: str = setting(DEFAULT_MODEL, help="as `serve --model`, in bfloat16")
    speculate: str = setting(SPECULATE_AUTO, choices=(SPECULATE_AUTO, *DRAFTER_NAMES), help="as `serve --speculate`")
    draft_model: str | None = setting(None, unit="MODEL", help="as `serve --draft-model`", default_text="none")
    output_tokens: int = setting(128, least=2, help="length of outputs")
    rounds: int = setting(5, least=1, help="rounds of each load, after one that is not measured")
    loads: str = setting("edit,again,code,random,busy", unit="NAME[,NAME]", help="what is asked")
    json_path: str | None = json_file()

    def model_post_init(self, _context: object) -> None:
        file_can_be_made("--json", self.json_path)
        unknown = sorted({*self.loads.split(",")} - {*LOADS})
        if unknown:
            raise ConfigError(f"--loads {','.join(unknown)}: there are {', '.join(LOADS)}", field="--loads")

    @property
    def chosen_loads(self) -> list[PromptLoad]:
        return [LOADS[name] for name in self.loads.split(",")]


class _Flags(Settings):
    options: SpeculationBenchOptions = group(SpeculationBenchOptions, "speculation")


Prompts = Callable[[PreTrainedTokenizerBase, random.Random], list[int]]


@dataclass(frozen=True, slots=True)
class PromptLoad:
    name: str
    prompt: Prompts
    at_once: int = 1
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class Round:
    """What the clusters with and without speculation took for the same prompts, in seconds per output token."""

    with_it_s: float
    without_s: float
    prompts: tuple[int, ...]
    """Their lengths in tokens."""
    counts: DraftCounts
    load: Load
    """What the worker that speculates reported afterwards."""
    plain_step_s: float
    """A step of the other worker, by its own fitted cost."""


@dataclass(slots=True)
class Measured:
    rounds: list[Round] = field(default_factory=list)
    is_equal: bool = True

    @property
    def with_it_s(self) -> float:
        return statistics.median(each.with_it_s for each in self.rounds)

    @property
    def without_s(self) -> float:
        return statistics.median(each.without_s for each in self.rounds)

    @property
    def ratio(self) -> float:
        return self.with_it_s / self.without_s

    def tokens(self, name: str) -> int:
        """Returns the tokens that were drafted, or kept, in all rounds."""
        return round(sum(sum(asdict(each.counts)[name]) for each in self.rounds))

    @property
    def facts(self) -> dict[str, object]:
        """What `--json` says of it, besides the prediction."""
        rounds = [
            {
                "with_it_s": each.with_it_s,
                "without_s": each.without_s,
                **asdict(each.counts),
                "cost": asdict(step_cost(each.load)),
                "plain_step_s": each.plain_step_s,
            }
            for each in self.rounds
        ]
        return {"ratio": self.ratio, "is_equal": self.is_equal, "rounds": rounds}


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


LOADS = {
    "edit": PromptLoad("edit, one at once", _edit),
    "again": PromptLoad("the same again, one at once", _again),
    "code": PromptLoad("code to write, one at once", _code_to_write),
    "random": PromptLoad("random text, one at once", _noise, temperature=1.0),
    "busy": PromptLoad("random text, 16 at once", _noise, at_once=16, temperature=1.0),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, _Flags)


def run(args: argparse.Namespace) -> int:
    """0, or 1 where an answer differs. Raises ServeError for bad flags."""
    options = flags.read(_Flags, args).options
    results, prefill = asyncio.run(_measure(options))
    predicted = dict[str, float | None].fromkeys(results)
    if options.draft_model is None:
        predicted |= _predicted(results, prefill, options.output_tokens)
    rows = [
        text_row(
            name,
            f"{1e3 * each.without_s:.2f}",
            f"{1e3 * each.with_it_s:.2f}",
            f"{each.ratio:.3f}",
            "-" if (ratio := predicted[name]) is None else f"{ratio:.3f}",
            str(each.tokens("drafted")),
            str(each.tokens("kept")),
            "equal" if each.is_equal else "DIFFERENT",
        )
        for name, each in results.items()
    ]
    console = console_for(options.json_path)
    titles = ("load", "off, ms per token", f"{options.speculate}, ms per token", "ratio", "simulated")
    grid = text_grid((*titles, "drafted", "kept", "answers"), rows)
    console.print(table_of(grid, f"{options.model}, {options.rounds} rounds"))
    facts = {name: {**each.facts, "predicted_ratio": predicted[name]} for name, each in results.items()}
    write_json(facts, options.json_path)
    return 0 if all(each.is_equal for each in results.values()) else 1


def _predicted(results: dict[str, Measured], prefill: Load, output_tokens: int) -> dict[str, float | None]:
    """Returns the ratio that the simulator predicts of each load: of medians over rounds, as the measured one."""
    gaps_s = [
        each.without_s - each.plain_step_s
        for measured in results.values()
        for each in measured.rounds
        if len(each.prompts) == 1
    ]
    between_s = max(0.0, statistics.median(gaps_s))
    predicted: dict[str, float | None] = {}
    for name, measured in results.items():
        fleet = CalibratedFleet(prefill, [each.load for each in measured.rounds], between_s)
        with_it_s = [
            simulated_token_s(
                fleet, each.counts.shape(len(each.prompts) * (output_tokens - 1)), each.prompts, output_tokens
            )
            for each in measured.rounds
        ]
        without_s = simulated_token_s(fleet, None, measured.rounds[0].prompts, output_tokens)
        predicted[name] = statistics.median(with_it_s) / without_s
    return predicted


async def _measure(options: SpeculationBenchOptions) -> tuple[dict[str, Measured], Load]:
    """Returns what was measured, and the last report of the prefill worker beside the one that speculates."""
    directory = fetch(options.model, "bfloat16", lambda stage, part: None)
    if options.draft_model is not None:
        fetch(options.draft_model, "bfloat16", lambda stage, part: None)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory)
    results = {load.name: Measured() for load in options.chosen_loads}
    async with contextlib.AsyncExitStack() as stack:
        clusters = {
            speculate: await stack.enter_async_context(_serving(options, directory, speculate))
            for speculate in (SPECULATE_OFF, options.speculate)
        }
        for load, number in itertools.product(options.chosen_loads, range(options.rounds + 1)):
            prompts = [load.prompt(tokenizer, random.Random(f"{number} {n}")) for n in range(load.at_once)]
            await _measure_round(options, clusters, load, prompts, number, results[load.name])
        prefill = await clusters[options.speculate].cluster.load("prefill-0")
    return results, prefill


class Serving(NamedTuple):
    cluster: ProcessCluster
    client: Client

    @property
    def metrics_address(self) -> str:
        return str(self.cluster.workers["decode-0"].info["metrics_address"])


@contextlib.asynccontextmanager
async def _serving(options: SpeculationBenchOptions, directory: Path, speculate: str) -> AsyncIterator[Serving]:
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, XDG_RUNTIME_DIR=folder):
        async with running_cluster(
            prefill=1,
            decode=1,
            model=ModelConfig(model=options.model),
            model_dir=directory,
            cache=CacheConfig(kv_cache_memory_bytes=POOL_BYTES),
            schedule=_schedule(options, speculate),
            borrow=False,
        ) as cluster:
            client = Client(cluster.grpc)
            try:
                yield Serving(cluster, client)
            finally:
                await client.close()


async def _measure_round(
    options: SpeculationBenchOptions,
    clusters: dict[str, Serving],
    load: PromptLoad,
    prompts: list[list[int]],
    number: int,
    measured: Measured,
) -> None:
    """Lets both clusters answer the prompts; of the first round of a load, answers are compared and no more."""
    plain, drafting = clusters[SPECULATE_OFF], clusters[options.speculate]
    before = DraftCounts.read(drafting.metrics_address)
    answers, seconds = [], {}
    for speculate, serving in sorted(clusters.items(), reverse=number % 2 == 0):
        seconds[speculate], said = await _round(serving.client, load, prompts, options.output_tokens)
        answers.append(said)
    measured.is_equal &= answers[0] == answers[1]
    if number:
        measured.rounds.append(
            Round(
                with_it_s=seconds[options.speculate],
                without_s=seconds[SPECULATE_OFF],
                prompts=tuple(len(prompt) for prompt in prompts),
                counts=DraftCounts.read(drafting.metrics_address).since(before),
                load=await drafting.cluster.load("decode-0"),
                plain_step_s=(await plain.cluster.load("decode-0")).seconds_per_step,
            )
        )


def _schedule(options: SpeculationBenchOptions, speculate: str) -> ScheduleConfig:
    draft_model = None if speculate == SPECULATE_OFF else options.draft_model
    return ScheduleConfig(speculate=speculate, draft_model=draft_model)


async def _round(
    client: Client, load: PromptLoad, prompts: list[list[int]], tokens: int
) -> tuple[float, list[list[int]]]:
    """Returns the mean seconds per output token after the first, and the answers."""

    async def ask(seed: int, prompt: list[int]) -> tuple[float, list[int]]:
        answer, first_s = list[int](), 0.0
        wanted = {"max_tokens": tokens, "ignore_eos": True, "temperature": load.temperature, "seed": seed}
        async for response in client.stream(prompt, **wanted):
            first_s = first_s or time.perf_counter()
            answer += response.token_ids
        return (time.perf_counter() - first_s) / (len(answer) - 1), answer

    asked = await asyncio.gather(*(ask(seed, prompt) for seed, prompt in enumerate(prompts)))
    return statistics.mean(seconds for seconds, _ in asked), [answer for _, answer in asked]
