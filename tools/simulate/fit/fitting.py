"""`twostroke simulate --fit`: a fleet from the request log of a real run."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median

from cluster.flags.checks import file_can_be_made
from tools.output import write_text
from tools.simulate.fit.core_fit import ProfiledStep, fitted_cores, read_steps
from tools.simulate.fleet.shape import Delays, FleetShape, SharedCores, TierShape
from tools.simulate.options import profile_text
from tools.simulate.traces.formats import lines_of, record_of
from tools.tables import console_for
from twostroke.base.errors import ConfigError
from twostroke.base.lifetime import Instant
from twostroke.config import Role, ScheduleConfig
from twostroke.kv_cache.tier import Tier
from twostroke.observability.request_log import AnswerRecord, WorkerRecord
from twostroke.scheduler.cost import StepCost


def run_fit(args: argparse.Namespace) -> int:
    if args.profile is None:
        raise ConfigError("--fit needs --profile FILE: where the fitted fleet goes", field="profile")
    file_can_be_made("--profile", args.profile)
    steps = () if args.steps is None else read_steps(Path(args.steps))
    shape = fitted(read_log(Path(args.fit)), steps=steps)
    write_text(profile_text(shape), args.profile)
    cost, delays = shape.cost, shape.delays
    console = console_for(None)
    console.print(
        f"{args.profile}: {shape.prefill} prefill + {shape.decode} decode workers, pages of {shape.block_size} tokens, "
        f"{1e6 * cost.prompt_token_s:.1f} us a prompt token, {1e3 * cost.step_s:.2f} ms a step, "
        f"{1e6 * cost.stream_s:.0f} us a stream, {shape.link_bytes_per_s / 1e9:.3g} GB/s; calls in ms: "
        f"frontend {1e3 * delays.frontend_s:.2f}, open {1e3 * delays.open_s:.2f}, pull {1e3 * delays.pull_s:.2f}, "
        f"token {1e3 * delays.token_s:.2f}",
        markup=False,
    )
    if shape.cores is not None:
        console.print(cores_text(shape.cores, shape.noise), markup=False)
    return 0


def cores_text(cores: SharedCores, noise: float) -> str:
    parts = ", ".join(
        f"{name} take {speeds.borrowed:.2f}x with a borrowed core and {speeds.beside:.2f}x beside another step"
        for name, speeds in (("streams", cores.streams), ("prompts", cores.prompts))
    )
    return f"shared cores: {parts}; {1e3 * cores.between_s:.2f} ms between two steps, noise {noise:.3f}"


PROMPT_TERMS = ("prompt_token_s", "prompt_step_s", "prompt_pair_s")
STREAM_TERMS = ("step_s", "stream_s", "context_token_s")
LIVE = ScheduleConfig()
PAST_S = 60.0
"""Seconds before the log's end: a worker whose last record is older is gone."""
IDLE_QUEUE_S = 0.001
"""A page source with less before it begins at once: what its pull takes besides computing is calls."""


@dataclass(frozen=True, slots=True)
class Log:
    name: str
    answers: tuple[AnswerRecord, ...]
    workers: tuple[WorkerRecord, ...]


def read_log(path: Path) -> Log:
    """Raises ConfigError naming line and field of what is malformed."""
    return parse_log(lines_of(path, "--fit"), str(path))


def parse_log(lines: Iterable[str], name: str) -> Log:
    answers: list[AnswerRecord] = []
    workers: list[WorkerRecord] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        record = record_of(line, f"{name}:{number}")
        if isinstance(record, AnswerRecord):
            answers.append(record)
        else:
            workers.append(record)
    return Log(name, tuple(answers), tuple(workers))


def fitted(*logs: Log, steps: Sequence[list[ProfiledStep]] = ()) -> FleetShape:
    """Fits a fleet from one or several runs of it, and from the steps of workers that share cores.

    Raises ConfigError where the logs have too little.
    """
    latest_of = [_latest(log) for log in logs]
    latest = [worker for workers in latest_of for worker in workers]
    prefill = [worker for worker in latest if worker.role == Role.PREFILL]
    decode = [worker for worker in latest if worker.role == Role.DECODE]
    name = logs[0].name
    if not decode:
        raise ConfigError(f"{name}: no line of a decode worker that serves", field="fit")
    shape = FleetShape()
    first = decode[0]
    step_tokens = _usual([worker.step_tokens for worker in prefill or decode], shape.step_tokens)
    decode_step_tokens = _usual([worker.step_tokens for worker in decode], step_tokens)
    shape = replace(
        shape,
        prefill=sum(worker.role == Role.PREFILL for worker in latest_of[0]),
        decode=sum(worker.role == Role.DECODE for worker in latest_of[0]),
        block_size=first.block_size,
        page_bytes=first.page_bytes,
        prefill_page_bytes=prefill[0].page_bytes if any(worker.conversion_page_s for worker in prefill) else None,
        conversion_page_s=_middle([worker.conversion_page_s for worker in prefill], 0.0),
        prefill_pages=_usual([worker.pages_total for worker in prefill], shape.prefill_pages),
        decode_pages=_usual([worker.pages_total for worker in decode], shape.decode_pages),
        step_tokens=step_tokens,
        decode_step_tokens=decode_step_tokens,
        # No line says these: they are the defaults of live workers.
        max_num_seqs=min(LIVE.max_num_seqs, max(1, min(step_tokens, decode_step_tokens) - 1)),
        local_prefill=LIVE.local_prefill,
        step_target_s=_middle([worker.step_target_s for worker in decode], shape.step_target_s),
        link_bytes_per_s=_middle(
            [link.bytes_per_s for worker in latest for link in worker.links], shape.link_bytes_per_s
        ),
        cost=_cost(name, prefill or decode, decode),
        decode_cost=_cost(name, decode, decode) if _know_prompts(decode) else None,
        tiers=TierShape(
            host_page_s=_page_s(decode, Tier.HOST),
            disk_page_s=_page_s(decode, Tier.DISK),
            prefill_host_page_s=_page_s(prefill, Tier.HOST),
            prefill_disk_page_s=_page_s(prefill, Tier.DISK),
        ),
    )
    if steps:
        found = fitted_cores(steps, shape.cost)
        shape = replace(shape, cost=found.cost, decode_cost=None, cores=found.cores, noise=found.noise)
    return replace(shape, delays=_delays([answer for log in logs for answer in log.answers], shape))


def _latest(log: Log) -> list[WorkerRecord]:
    """Returns the last line of each worker that serves at the end."""
    last: dict[str, WorkerRecord] = {}
    for worker in log.workers:
        last[worker.worker] = worker
    if not last:
        raise ConfigError(
            f"{log.name}: no line of a worker: was the router's --request-log on long enough?", field="fit"
        )
    end_s = max(worker.at_s for worker in last.values())
    return [worker for worker in last.values() if worker.at_s > end_s - PAST_S and worker.status == "serving"]


def _cost(name: str, prompts: Sequence[WorkerRecord], streams: Sequence[WorkerRecord]) -> StepCost:
    """Returns the costs: prompt terms from workers that compute prompts, the others from workers that sample."""
    terms = {term: _term(term, prompts) for term in PROMPT_TERMS} | {
        term: _term(term, streams) for term in STREAM_TERMS
    }
    cost = StepCost(**{part.name: terms[part.name] for part in fields(StepCost)})
    if cost.prompt_token_s <= 0 and cost.prompt_pair_s <= 0 and cost.prompt_step_s <= 0:
        raise ConfigError(f"{name}: no worker has said what a prompt token costs", field="prompt_token_s")
    if cost.step_s <= 0 and cost.stream_s <= 0:
        raise ConfigError(f"{name}: no decode worker has said what a step costs", field="step_s")
    return cost


def _know_prompts(workers: Sequence[WorkerRecord]) -> bool:
    """Returns whether a worker has said what a prompt costs it."""
    return any(worker.costs.get(term, 0.0) > 0 for worker in workers for term in PROMPT_TERMS)


def _page_s(workers: Sequence[WorkerRecord], tier: Tier) -> float | None:
    """Returns the seconds to load one page, where a worker has such a tier."""
    known = [seconds for worker in workers if (seconds := worker.tiers.get(tier.name.lower()))]
    return median(known) if known else None


def _term(term: str, workers: Sequence[WorkerRecord]) -> float:
    """Returns a term. A zero is known only where other terms are not zero."""
    known = [worker.costs.get(term, 0.0) for worker in workers if any(worker.costs.values())]
    return max(0.0, median(known)) if known else 0.0


def _delays(answers: Sequence[AnswerRecord], shape: FleetShape) -> Delays:
    """Returns the delays, each the median of what was seen, or the usual one where nothing was seen."""
    usual = Delays()
    smooth = [answer for answer in answers if answer.attempts == 1 and answer.ttft_s is not None]
    return replace(
        usual,
        frontend_s=_middle(_between(smooth, Instant.RECEIVED, Instant.ROUTED), usual.frontend_s),
        # There and back.
        open_s=_middle(_between(smooth, Instant.ROUTED, Instant.OPENED), 2 * usual.open_s) / 2,
        pull_s=_centre(_pull_residuals(smooth, shape), 2 * usual.pull_s) / 2,
        token_s=_middle(_token_residuals(smooth), usual.token_s),
    )


def _between(answers: Iterable[AnswerRecord], start: Instant, end: Instant) -> list[float]:
    pairs = ((answer.instants.get(start), answer.instants.get(end)) for answer in answers)
    return [ended - started for started, ended in pairs if started is not None and ended is not None]


def _pull_residuals(answers: Iterable[AnswerRecord], shape: FleetShape) -> list[float]:
    """Returns seconds from the claim of pages to the first page, without its transfer and without what its source did
    before. Requests that loaded from lower tiers are left out.

    They are of sources that held the first pages, if there were any: no step's length is guessed there.
    """
    residuals: dict[bool, list[float]] = {True: [], False: []}
    for answer in answers:
        if answer.source is None or answer.peer is not None or answer.forecast.get("queue_s", 0.0) > IDLE_QUEUE_S:
            continue
        if answer.forecast.get("load_s", 0.0) or answer.forecast.get("decode_load_s", 0.0):
            continue
        computed = int(answer.forecast.get("computed_tokens", 0))
        held_pages = int(answer.forecast.get("pulled_blocks", 0.0)) - computed // shape.block_size
        source_s = shape.conversion_page_s * held_pages if held_pages > 0 else _computed_s(computed, shape)
        residuals[held_pages > 0] += [
            seconds - source_s - shape.page_bytes / shape.link_bytes_per_s
            for seconds in _between([answer], Instant.ADMITTED, Instant.FIRST_PAGE)
        ]
    return residuals[True] or residuals[False]


def _computed_s(tokens: int, shape: FleetShape) -> float:
    """Returns seconds until a source announces the first ones of this many tokens that it computes."""
    times = 1.0 if shape.cores is None else shape.cores.prompts.borrowed
    chunk = min(tokens, shape.step_tokens)
    chunk_s = times * shape.cost.of_prompt(chunk, 0, shape.step_tokens)
    return chunk_s + shape.conversion_page_s * (chunk // shape.block_size)


def _token_residuals(answers: Iterable[AnswerRecord]) -> list[float]:
    """Returns the seconds from the decode worker's first token to the router's."""
    residuals = []
    for answer in answers:
        routed, first = answer.instants.get(Instant.ROUTED), answer.instants.get(Instant.FIRST_TOKEN)
        if routed is not None and first is not None and answer.ttft_s is not None:
            residuals.append(max(0.0, routed + answer.ttft_s - first))
    return residuals


def _middle(values: Sequence[float], otherwise: float) -> float:
    known = [value for value in values if value > 0]
    return median(known) if known else otherwise


def _centre(residuals: Sequence[float], otherwise: float) -> float:
    """Returns the median of what is left over, which is below zero wherever work took less than predicted."""
    middle = median(residuals) if residuals else 0.0
    return middle if middle > 0 else otherwise


def _usual(values: Sequence[int], otherwise: int) -> int:
    return round(_middle(values, otherwise))
