"""Runs the loads of a comparison in order, one server under load at a time, and makes their prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tools.bench.client import fixed_concurrency, run_plan
from tools.bench.compare.options import CompareOptions
from tools.bench.compare.scenario import Chats, Scenario, ScenarioLoad
from tools.bench.connect import connect
from tools.bench.endpoints import Endpoint
from tools.bench.load import PlannedRequest, Segment, Stream, arrivals_of, even_plan
from tools.bench.measure import Record, Report, summarise

WARMUP_OUTPUT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class ServerRun:
    """All loads of one scenario at one endpoint, in one round."""

    round: int
    """From 0 on."""
    number: int
    """Number of the prompts; all endpoints get the same ones in a round."""
    scenario: Scenario
    endpoint: Endpoint


@dataclass(frozen=True, slots=True)
class CompareRun:
    """One load at one endpoint, with what was measured."""

    round: int
    load: ScenarioLoad
    endpoint: str
    records: tuple[Record, ...]
    report: Report


def server_runs(rounds: int, scenarios: Sequence[Scenario], endpoints: Sequence[Endpoint]) -> list[ServerRun]:
    return [ServerRun(*run) for run in in_turns(rounds, scenarios, endpoints)]


def plan_of(load: ScenarioLoad, seed: int) -> list[PlannedRequest]:
    arrivals = arrivals_of("poisson", load.rate, load.requests, seed)
    if load.chats is not None:
        return _chat_plan(load.chats, arrivals)
    prefix = (Segment(Stream.PREFIX, 0, load.shared_tokens),) if load.shared_tokens else ()
    tokens = load.prompt_tokens - load.shared_tokens, load.output_tokens
    return even_plan(arrivals, tokens, prefix=prefix, first=load.first)


def _chat_plan(chats: Chats, due_s: Sequence[float | None]) -> list[PlannedRequest]:
    """Returns the requests of all chats: the first turn of every chat, then the second one, and so on."""
    numbers = [(turn, chat) for turn in chats.turns for chat in range(chats.count)]
    return [
        PlannedRequest(index, _history(chats, chat, turn), chats.answer_tokens, due)
        for index, ((turn, chat), due) in enumerate(zip(numbers, due_s, strict=True))
    ]


def _history(chats: Chats, chat: int, turn: int) -> tuple[Segment, ...]:
    """Returns the prompt of a chat's turn: the system prompt, the messages, and the answers but the last one."""
    system = Segment(Stream.PREFIX, chat % chats.system_prompts, chats.system_tokens)
    turns: list[Segment] = []
    for earlier in range(turn + 1):
        number = 2 * (earlier * chats.count + chat)
        turns.append(Segment(Stream.OWN, number, chats.user_tokens))
        if earlier < turn:
            turns.append(Segment(Stream.OWN, number + 1, chats.answer_tokens))
    return (system, *turns)


def warmup_of(load: ScenarioLoad, count: int) -> list[PlannedRequest]:
    """Returns requests as long as the load's, with short answers; none of their tokens is in a cache later."""
    tokens = load.prompt_tokens, min(load.output_tokens, WARMUP_OUTPUT_TOKENS)
    return even_plan([None] * count, tokens, stream=Stream.WARMUP, first=load.first)


def runs_of(options: CompareOptions) -> int:
    return options.rounds * len(options.endpoints.all) * sum(len(scenario.loads) for scenario in options.scenarios)


async def run_load(options: CompareOptions, run: ServerRun, load: ScenarioLoad) -> CompareRun:
    endpoints, endpoint = options.endpoints, run.endpoint
    client = await connect(endpoint.target, endpoints.prompt_seed(endpoint, run.number), endpoints.vocab_size)
    try:
        lanes = load.concurrency or 1
        await fixed_concurrency(client, warmup_of(load, options.warmup), lanes, lambda record: None)
        measured = await run_plan(client, plan_of(load, run.number), load.concurrency, lambda record: None)
    finally:
        await client.close()
    return CompareRun(
        run.round, load, endpoint.name, measured.records, summarise(measured.records, measured.client_cpu_s)
    )


LoadT = TypeVar("LoadT")
ContestantT = TypeVar("ContestantT")


def in_turns(
    rounds: int, loads: Sequence[LoadT], contestants: Sequence[ContestantT]
) -> Iterator[tuple[int, int, LoadT, ContestantT]]:
    """Yields (round, number of round and load, load, contestant). The order of the contestants is reversed from each
    round to the next and from each load to the next, so that slow drift cancels.
    """
    for number in range(rounds * len(loads)):
        round_number, which = divmod(number, len(loads))
        order = contestants if (round_number + which) % 2 == 0 else tuple(reversed(contestants))
        for contestant in order:
            yield round_number, number, loads[which], contestant
