"""The simulator on the arrivals of a real cluster; a table, JSON."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.trials.bench.shared_cores.options import Checked
from tests.trials.bench.shared_cores.trial import Measured, RealRun, run_real
from tools.output import write_json, write_text
from tools.simulate.fit.fitting import cores_text, fitted
from tools.simulate.fit.likeness import SHARES, Likeness, likeness_json, print_likeness
from tools.simulate.fleet import results
from tools.simulate.fleet.results import percentile
from tools.simulate.fleet.shape import FleetShape
from tools.simulate.options import profile_text
from tools.simulate.runs import Trial, run_trial
from tools.simulate.traces.trace import Trace, TraceRow
from tools.tables import console_for

POLICY = "kv"
MOST_OTHERS = 0.05
"""Share of the machine that others may take before a run says more of them than of ours."""


def run_session(options: Checked) -> int:
    """Exit code: 1 if a simulated percentile is not as near as was asked for."""
    said = options.said
    with tempfile.TemporaryDirectory() as folder:
        real = asyncio.run(run_real(said, options.serve_flags, Path(folder) / "requests.log"))
    shape = dataclasses.replace(fitted(real.log, steps=real.steps), seed=said.seed)
    found = [beside(load, shape, (said.prompt_tokens, said.output_tokens)) for load in real.loads]
    console = console_for(said.json_path)
    _print(real, shape, found, console)
    if said.fleet is not None:
        write_text(profile_text(shape), said.fleet)
    write_json(_as_json(real, shape, found), said.json_path)
    ratios = [ratio for each in found for ratio in each.ratios]
    return 0 if all(ratio is not None and abs(ratio - 1) <= said.within for ratio in ratios) else 1


def beside(load: Measured, shape: FleetShape, tokens: tuple[int, int]) -> Likeness:
    """Simulates the load's arrivals, with prompts and answers of so many `tokens`; times are the client's."""
    run = run_trial(
        Trial(variant=POLICY, trace=trace_of(load.due_s, tokens, shape.block_size), shape=shape, holds=True)
    )
    real, simulated = load.report.ttft_s, results.ttfts(run)
    return Likeness(
        policy=f"{load.rate:g}/s",
        requests=load.report.completed,
        real_s=(None, None) if real is None else (real.p50, real.p90),
        simulated_s=tuple(percentile(simulated, share) for share in SHARES),
    )


def trace_of(due_s: tuple[float, ...], tokens: tuple[int, int], block_tokens: int) -> Trace:
    """Prompts that share nothing."""
    prompt_tokens, output_tokens = tokens
    blocks = -(-prompt_tokens // block_tokens)
    rows = tuple(
        TraceRow(at_s, prompt_tokens, output_tokens, tuple(range(number * blocks, (number + 1) * blocks)))
        for number, at_s in enumerate(due_s)
    )
    return Trace("arrivals", block_tokens, rows)


def _print(real: RealRun, shape: FleetShape, found: list[Likeness], console: Console) -> None:
    assert shape.cores is not None
    console.print(cores_text(shape.cores, shape.noise), markup=False)
    print_likeness(found, "time to first token at the client, simulated over real, by arrivals", console)
    if real.others > MOST_OTHERS:
        console.print(f"note: others took {real.others:.0%} of the machine while steps were profiled", markup=False)
    for load in real.loads:
        if load.others > MOST_OTHERS:
            console.print(f"note: at {load.rate:g}/s others took {load.others:.0%} of the machine", markup=False)
        if load.report.failed:
            console.print(f"note: at {load.rate:g}/s {load.report.failed} requests failed", markup=False)


def _as_json(real: RealRun, shape: FleetShape, found: list[Likeness]) -> dict[str, Any]:
    return {
        "fleet": dataclasses.asdict(shape),
        "others_while_profiled": real.others,
        "loads": [
            {"rate": load.rate, "others": load.others, "report": dataclasses.asdict(load.report)} for load in real.loads
        ],
        "first_tokens": likeness_json(found),
    }
