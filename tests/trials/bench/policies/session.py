"""Trials in turns; their tables, the simulator's beside them, JSON."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.trials.bench.policies import replay
from tests.trials.bench.policies.metrics import METRICS, compared, notes_of
from tests.trials.bench.policies.options import PoliciesOptions
from tests.trials.bench.policies.trial import Course, Trial, probe, run_trial
from tools.bench.compare.rounds import in_turns
from tools.bench.connect import allow_many_sockets
from tools.bench.ratios import LoadOutcome, loads_json, ratio_grid
from tools.output import write_json
from tools.simulate.fit.fitting import fitted
from tools.simulate.fit.likeness import SHARES, Likeness, likeness_json, print_likeness
from tools.simulate.fleet.shape import FleetShape
from tools.simulate.loads import offered_in_turns
from tools.simulate.runs import paced, runner, span_s
from tools.simulate.traces.trace import Trace
from tools.simulate.variants import BASELINE
from tools.tables import console_for, table_of
from twostroke.base.errors import ConfigError
from twostroke.config import PACED_PREFIX
from twostroke.engine.backends.paced.runner import PacedSpec

SCHEMA_VERSION = 1
"""Version of the JSON; it is raised when a key changes its meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    utilisation: float
    trace: Trace
    rate_scale: float

    @property
    def title(self) -> str:
        rate = len(self.trace.rows) / span_s(self.trace)
        return f"round-robin at {self.utilisation:g}: {rate:.2f} requests/s (x{self.rate_scale:.3g})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    load: Load
    shape: FleetShape
    found: tuple[Likeness, ...]


def run_session(options: PoliciesOptions) -> int:
    """Exit code: 1 if some trial answered nothing."""
    trace = options.source.read()
    with _folder(options.log_dir) as folder:
        loads, trials = asyncio.run(_measure(options, trace, folder))
    titles = {load.utilisation: load.title for load in loads}
    outcomes = compared(trials, titles.__getitem__, options.policies, BASELINE)
    console = console_for(options.json_path)
    console.print(_heading(options, trace), markup=False)
    for outcome in outcomes:
        console.print(table_of(ratio_grid(outcome, BASELINE, METRICS), outcome.load))
    for note in notes_of(trials):
        console.print(f"note: {note}", markup=False)
    simulated = _simulate(options, loads, trials) if options.simulates else []
    for each in simulated:
        _print_replayed(each, console)
    write_json(_as_json(options, outcomes, trials, simulated), options.json_path)
    return 0 if all(trial.report.completed for trial in trials) else 1


@contextmanager
def _folder(log_dir: Path | None) -> Iterator[Path]:
    if log_dir is not None:
        yield log_dir
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


async def _measure(options: PoliciesOptions, trace: Trace, folder: Path) -> tuple[list[Load], list[Trial]]:
    allow_many_sockets()
    course = Course(served=options.served, warmup=options.warmup, seed=options.source.seed)
    first = fitted(await probe(course, BASELINE, _new_log(folder, "probe")))
    loads = [_load(trace, utilisation, _truly(first, options)) for utilisation in options.utilisations]
    trials: list[Trial] = []
    total = options.rounds * len(loads) * len(options.policies)
    for round_number, _, load, policy in in_turns(options.rounds, loads, options.policies):
        log_path = _new_log(folder, f"{round_number + 1}-{load.utilisation:g}-{policy}")
        report, busy, log = await run_trial(course, policy, load.trace, log_path)
        trial = Trial(
            round=round_number, utilisation=load.utilisation, policy=policy, report=report, busy=busy, log=log
        )
        trials.append(trial)
        print(
            f"bench: {len(trials)}/{total} round {round_number + 1}, {load.utilisation:g}, {policy}: "
            f"{report.completed} requests in {report.duration_s:.1f} s, {report.failed} failed",
            file=sys.stderr,
            flush=True,
        )
    return loads, trials


def _new_log(folder: Path, name: str) -> Path:
    """Logs are appended to."""
    path = (folder / f"{name}.jsonl").absolute()
    path.unlink(missing_ok=True)
    return path


def _truly(shape: FleetShape, options: PoliciesOptions) -> FleetShape:
    """A paced model's costs are known, not only measured."""
    model = options.served.model
    if not model.startswith(PACED_PREFIX):
        return shape
    return dataclasses.replace(shape, cost=PacedSpec.parse(model.removeprefix(PACED_PREFIX)).cost, decode_cost=None)


def _load(trace: Trace, utilisation: float, shape: FleetShape) -> Load:
    if trace.block_tokens != shape.block_size:
        raise ConfigError(
            f"the trace has blocks of {trace.block_tokens} tokens and the workers of {shape.block_size}: "
            f"--length-scale {shape.block_size / trace.block_tokens:g} times as much makes them equal",
            field="length_scale",
        )
    scale = utilisation / offered_in_turns(trace, shape)
    return Load(utilisation=utilisation, trace=paced(trace, scale), rate_scale=scale)


def _simulate(options: PoliciesOptions, loads: Sequence[Load], trials: Sequence[Trial]) -> list[Replayed]:
    replays = []
    for load in loads:
        own = [trial for trial in trials if trial.utilisation == load.utilisation]
        shape = replay.fleet_of(own, options.served)
        with runner(1) as run_all:
            runs = replay.replayed(options.policies, load.trace, shape, run_all)
        found = tuple(replay.likeness(own, run) for run in runs)
        replays.append(Replayed(load=load, shape=shape, found=found))
    return replays


def _print_replayed(replayed: Replayed, console: Console) -> None:
    print_likeness(replayed.found, f"{replayed.load.title}: first tokens, simulated over real", console)
    names = [each.policy for each in replayed.found]
    for at, share in enumerate(SHARES):
        real = replay.ranking(names, [each.real_s[at] for each in replayed.found])
        simulated = replay.ranking(names, [each.simulated_s[at] for each in replayed.found])
        console.print(f"p{100 * share:g}: real {real}; simulated {simulated}", markup=False)


def _heading(options: PoliciesOptions, trace: Trace) -> str:
    served, rounds = options.served, options.rounds
    return (
        f"{options.source.label}: {len(trace.rows)} requests, lengths x {options.source.length_scale:g}; "
        f"{served.prefill} prefill + {served.decode} decode workers, {served.model}; "
        f"{rounds} round{'s' if rounds > 1 else ''}, medians over them, times in ms; seed {options.source.seed}"
    )


def _as_json(
    options: PoliciesOptions,
    outcomes: Sequence[LoadOutcome],
    trials: Sequence[Trial],
    simulated: Sequence[Replayed],
) -> dict[str, Any]:
    source = options.source.model_dump()
    return {
        "schema_version": SCHEMA_VERSION,
        "source": source,
        "served": dataclasses.asdict(options.served),
        "baseline": BASELINE,
        "rounds": options.rounds,
        "loads": loads_json(outcomes),
        "notes": notes_of(trials),
        "trials": [
            {
                "round": trial.round,
                "utilisation": trial.utilisation,
                "policy": trial.policy,
                "refused": trial.refused,
                "failed": trial.failed,
                "busy": dataclasses.asdict(trial.busy),
                "report": dataclasses.asdict(trial.report),
            }
            for trial in trials
        ],
        "simulated": [
            {
                "utilisation": each.load.utilisation,
                "rate_scale": each.load.rate_scale,
                "fleet": dataclasses.asdict(each.shape),
                "first_tokens": likeness_json(each.found),
            }
            for each in simulated
        ],
    }
