"""The search at several servers in turns, and what came out: a table, JSON."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from typing import Any

from tools.bench.connect import all_ready
from tools.bench.endpoints import Endpoint
from tools.bench.goodput.options import GoodputOptions
from tools.bench.goodput.trial import RateTrial, try_rate
from tools.output import write_json
from tools.rate_search import Bracket, Tried, bracket_of, decided, next_rate
from tools.tables import Grid, console_for, table_of, text_grid, text_row

SCHEMA_VERSION = 1
"""Version of the JSON; it is raised when a key changes its meaning."""

Trials = dict[str, list[RateTrial]]
"""The trials of each endpoint, in the order in which they were made."""


def run_session(options: GoodputOptions) -> int:
    """Returns the exit code: 1 if some endpoint keeps the promise at no rate that was tried."""
    trials = asyncio.run(find(options))
    console = console_for(options.search.json_path)
    console.print(table_of(_grid(trials, options), "goodput, requests/s"))
    console.print(f"[dim]{_explanation(options)}[/dim]")
    write_json(as_json(trials, options), options.search.json_path)
    return 0 if all(found(made, options.search.votes).passing is not None for made in trials.values()) else 1


async def find(options: GoodputOptions) -> Trials:
    """Runs one trial at each server in turn, so that a slow minute of the machine does not affect only one server."""
    endpoints = options.endpoints
    await all_ready(endpoints)
    trials: Trials = {endpoint.name: [] for endpoint in endpoints.all}
    searching = list(endpoints.all)
    number = 0
    while searching:
        for endpoint in tuple(searching):
            made = trials[endpoint.name]
            rate = next_rate(_tried(made, options.search.votes), options.search.limits)
            if rate is None:
                searching.remove(endpoint)
                continue
            vote = sum(trial.rate == rate for trial in made)
            trial = await try_rate(options, endpoint, rate, number, vote)
            made.append(trial)
            _say(endpoint, trial)
            number += 1
    return trials


def found(trials: list[RateTrial], votes: int) -> Bracket:
    return bracket_of(_tried(trials, votes))


def ratio_of(own: Bracket, base: Bracket) -> dict[str, float | None] | None:
    """Returns the ratio to the baseline, and its range by the brackets. None where either passed at no rate."""
    if own.passing is None or base.passing is None:
        return None
    return {
        "ratio": own.passing / base.passing,
        "min": None if base.failing is None else own.passing / base.failing,
        "max": None if own.failing is None else own.failing / base.passing,
    }


def as_json(trials: Trials, options: GoodputOptions) -> dict[str, Any]:
    base, promise = found(trials[options.endpoints.baseline], options.search.votes), options.promise
    return {
        "schema_version": SCHEMA_VERSION,
        "promise": {"ttft_s": promise.ttft_s, "inter_token_s": promise.inter_token_s, "share": promise.share},
        "prompt_tokens": options.requests.prompt_tokens,
        "output_tokens": options.requests.output_tokens,
        "arrivals": options.requests.arrivals,
        "duration_s": options.search.duration_s,
        "votes": options.search.votes,
        "seed": options.endpoints.seed,
        "baseline": options.endpoints.baseline,
        "endpoints": {
            endpoint.name: {
                "endpoint": endpoint.target.name,
                "goodput_per_s": own.passing,
                "failing_per_s": own.failing,
                "over_baseline": ratio_of(own, base),
                "trials": [dataclasses.asdict(trial) for trial in trials[endpoint.name]],
            }
            for endpoint in options.endpoints.all
            for own in [found(trials[endpoint.name], options.search.votes)]
        },
    }


def _tried(trials: list[RateTrial], votes: int) -> list[Tried]:
    return decided([Tried(trial.rate, trial.passed) for trial in trials], votes)


def _say(endpoint: Endpoint, trial: RateTrial) -> None:
    print(
        f"bench: {trial.rate:.3g} requests/s, {endpoint.name}: {'passes' if trial.passed else 'fails'} "
        f"({trial.ended} of {trial.requests} ended: {trial.met} met, {trial.missed_ttft} missed by first token, "
        f"{trial.missed_inter_token} by inter-token, {trial.failed} failed)",
        file=sys.stderr,
        flush=True,
    )


def _grid(trials: Trials, options: GoodputOptions) -> Grid:
    baseline, rows = options.endpoints.baseline, []
    base = found(trials[baseline], options.search.votes)
    for name, made in trials.items():
        own = found(made, options.search.votes)
        over = None if name == baseline else ratio_of(own, base)
        rates = ("nowhere" if rate is None else f"{rate:.3g}" for rate in (own.passing, own.failing))
        rows.append(text_row(name, *rates, "" if over is None else _shown(over), str(len(made))))
    return text_grid(("", "passes at", "fails at", f"over {baseline}", "trials"), rows)


def _shown(over: dict[str, float | None]) -> str:
    low, high = ("?" if over[end] is None else f"{over[end]:.2f}" for end in ("min", "max"))
    return f"{over['ratio']:.2f}x ({low}..{high})"


def _explanation(options: GoodputOptions) -> str:
    promise, asked = options.promise, options.requests
    return (
        f"Highest rate ({asked.arrivals}, {asked.prompt_tokens} -> {asked.output_tokens} tokens) at which "
        f"{promise.share:.0%} of requests have their first token within {promise.ttft_s:g} s and an inter-token p99 "
        f"within {promise.inter_token_ms:g} ms. Seed {options.endpoints.seed}."
    )
