"""The matrix of speculation: settings of it, and 32 prompts in seven ways of answering them."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from transformers import AutoTokenizer

from tests.cluster.processes import Client, ProcessCluster, running_cluster
from tests.cluster.requests.deaths import kill_the_busiest
from tests.cluster.requests.test_calls_resume import TOOL
from tests.cluster.requests.test_exact_resume import MODES, ask
from tests.cluster.requests.test_grammars import OF_SCHEMA
from tests.metrics_page import total
from twostroke.config import (
    DRAFT_MODEL,
    DRAFTER_NAMES,
    SPECULATE_AUTO,
    SPECULATE_OFF,
    CacheConfig,
    ModelConfig,
    ScheduleConfig,
)
from twostroke.config.output import OutputConfig

WORKERS = ("decode-0", "decode-1")
AT_ONCE = {"bfloat16": 8, "float32": 32}
"""Requests of the matrix at a time, by number format. Beside many more, no draft is worth its rows; in float32,
products have as many rows whether they are needed or not."""


@dataclass(frozen=True, slots=True)
class Speculated:
    """A cluster whose decode workers speculate in one way."""

    name: str
    speculate: str
    decode_module: str = "decode_worker"

    @property
    def has_draft_model(self) -> bool:
        return self.speculate in (SPECULATE_AUTO, DRAFT_MODEL)


OFF = Speculated("off", SPECULATE_OFF)
AUTO = Speculated("auto", SPECULATE_AUTO)
SWITCHED = Speculated("switching", SPECULATE_AUTO, "tests.cluster.switching_worker")
"""Nobody, one drafter or all of them at each step of an answer."""
SURE = Speculated(DRAFT_MODEL, DRAFT_MODEL, "tests.cluster.sure_worker")
"""The price of a draft model of so small a model would forbid it."""
EACH = (*(Speculated(name, name) for name in DRAFTER_NAMES if name != DRAFT_MODEL), SURE)

Answers = Mapping[str, object]
Asking = Callable[[ProcessCluster, Client], Awaitable[Answers]]
"""Asks a cluster, and returns each answer by a name."""


@dataclass(slots=True)
class Outcome:
    first: Answers
    again: Answers
    """The same, asked while a decode worker is killed, where one is."""
    drafted: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)
    """Tokens by drafter, those of the killed worker up to its second asking."""
    reopened: float = 0
    """Requests that went on elsewhere."""

    def __str__(self) -> str:
        return (
            f"{len(self.first)} answers, {tokens_in(self.first)} tokens, {self.reopened:.0f} reopened; "
            f"drafted {dict(+self.drafted)}, kept {dict(+self.kept)}"
        )


@asynccontextmanager
async def speculating(
    setting: Speculated, model: ModelConfig, directory: Path, draft_model: Path, kv_format: str | None
) -> AsyncIterator[ProcessCluster]:
    """Starts a cluster with two decode workers, one of which may be killed."""
    async with running_cluster(
        prefill=1,
        decode=len(WORKERS),
        model=model,
        model_dir=directory,
        cache=CacheConfig(kv_cache_memory_bytes=256 << 20, kv_format=kv_format),
        schedule=ScheduleConfig(
            speculate=setting.speculate, draft_model=str(draft_model) if setting.has_draft_model else None
        ),
        output=OutputConfig(tool_call_parser="hermes"),
        decode_module=setting.decode_module,
    ) as cluster:
        yield cluster


async def outcome_of(cluster: ProcessCluster, asking: Asking, *, kills: bool) -> Outcome:
    """Asks once, or twice where it `kills`: the second time the busiest decode worker ends meanwhile."""
    client = Client(cluster.grpc)
    first = await asking(cluster, client)
    if not kills:
        await client.close()
        (drafted, kept), (more_drafted, more_kept) = (counted(cluster, worker) for worker in WORKERS)
        return Outcome(first, first, drafted + more_drafted, kept + more_kept)
    before = {worker: counted(cluster, worker) for worker in WORKERS}
    asked = asyncio.ensure_future(asking(cluster, client))
    living = {*WORKERS}
    await kill_the_busiest(cluster, living, random.Random(1).randint(20, 80), asked)
    again = await asked
    await client.close()
    (left,) = living
    (victim,) = {*WORKERS} - living
    drafted, kept = (one + other for one, other in zip(before[victim], counted(cluster, left), strict=True))
    return Outcome(first, again, drafted, kept, total(cluster.http, "twostroke_reopened_requests_total"))


def counted(cluster: ProcessCluster, worker: str) -> tuple[Counter[str], Counter[str]]:
    """Returns the drafted and the kept tokens of a worker by drafter."""
    address = str(cluster.workers[worker].info["metrics_address"])
    drafted, kept = (
        Counter(
            {
                name: int(total(address, f"twostroke_speculation_{what}_tokens_total", drafter=name))
                for name in DRAFTER_NAMES
            }
        )
        for what in ("drafted", "kept")
    )
    return drafted, kept


# The matrix

WAYS: dict[str, dict[str, object]] = {
    name: MODES[name] | {"max_tokens": 32, "logprobs": 2}
    for name in ("greedy", "drawn", "truncated", "penalised", "biased")
} | {"grammar": {"structured_output": OF_SCHEMA, "max_tokens": 120, "logprobs": 2, "temperature": 0.8, "seed": 19}}
"""How each prompt is answered over gRPC; "tools" come beside, over HTTP."""
SUBJECTS = ("the sea", "a bridge", "winter wheat", "old maps", "a violin", "the tax year", "sparrows", "a bakery")


def texts() -> list[str]:
    """Returns 32 prompts: code to repeat, questions that are nearly the same, prose, and lines with a pattern."""
    code = [
        f"# Repeat this code.\ndef area_{n}(width, height):\n    return width * height + {n}\n\ndef area_{n}(width,"
        for n in range(8)
    ]
    questions = [f"Question: What should everybody know about {subject}?\nAnswer:" for subject in SUBJECTS]
    prose = [f"Once there was a story about {subject}. It began so: {subject.title()}" for subject in SUBJECTS]
    lines = ["\n".join(f"{n * step}: row {n * step}" for n in range(6)) + "\n" for step in range(1, 9)]
    return [*code, *questions, *prose, *lines]


class Matrix:
    """Asks every prompt in every way, some at a time."""

    def __init__(self, directory: Path, at_once: int) -> None:
        self._at_once = at_once
        tokenizer = AutoTokenizer.from_pretrained(directory)
        self._texts = texts()
        self._prompts = [list(tokenizer(text)["input_ids"]) for text in self._texts]

    async def __call__(self, cluster: ProcessCluster, client: Client) -> Answers:
        slots = asyncio.Semaphore(self._at_once)
        async with httpx.AsyncClient(base_url=cluster.http, timeout=600) as http:

            async def grpc_answer(way: str, number: int) -> tuple[str, object]:
                options = dict(WAYS[way])
                if "seed" in options:
                    options["seed"] = number
                async with slots:
                    return f"{way} {number}", await ask(client, options, self._prompts[number])

            async def call(number: int) -> tuple[str, object]:
                async with slots:
                    return f"tools {number}", await called(http, self._texts[number], number)

            numbers = range(len(self._prompts))
            coming = [grpc_answer(way, number) for number, way in itertools.product(numbers, WAYS)]
            return dict(await asyncio.gather(*coming, *(call(number) for number in numbers)))


async def called(http: httpx.AsyncClient, text: str, seed: int) -> object:
    """Returns all that an answer says that has to call a tool, but for ids and times."""
    body = {
        "messages": [{"role": "user", "content": f"Take a note of this.\n{text}"}],
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0.7,
        "seed": seed,
        "logprobs": True,
        "top_logprobs": 2,
        "max_tokens": 120,
    }
    got = await http.post("/v1/chat/completions", json=body)
    assert got.status_code == 200, got.text
    (choice,) = got.json()["choices"]
    for tool_call in choice["message"].get("tool_calls") or ():
        tool_call.pop("id")
    return json.dumps(choice, sort_keys=True)


def tokens_in(answers: Answers) -> int:
    """Returns how many tokens with logprobs are in the answers."""
    return sum(
        len(json.loads(answer)["logprobs"]["content"])
        if isinstance(answer, str)
        else sum(len(said.tokens) for said in answer.values())  # type: ignore[attr-defined]  # of `ask`
        for answer in answers.values()
    )
