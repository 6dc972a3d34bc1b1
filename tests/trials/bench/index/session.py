"""A trial per subject, one after the other: a table with ratios, JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cluster.flags.checks import STDOUT
from tests.trials.bench.index.options import IndexOptions
from tests.trials.bench.index.trial import Lookup, Trial
from tools.output import write_json
from twostroke.base.errors import ConfigError

SCHEMA_VERSION = 1
"""Version of the JSON; it is raised when a key changes its meaning."""

COLUMNS = 120
"""A table's width where no terminal says one."""

OURS = "twostroke"
ROOT = Path(__file__).parents[4]


def run_session(options: IndexOptions) -> int:
    pythons = {OURS: sys.executable}
    if options.dynamo_program is not None:
        pythons["dynamo"] = options.dynamo_program
    trials = [_trial(name, python, options) for name, python in pythons.items()]
    console = Console(stderr=options.json_path == STDOUT)
    if not console.is_terminal:
        console.width = COLUMNS
    console.print(_table(trials, options))
    write_json(as_json(options, trials), options.json_path)
    return 0


def as_json(options: IndexOptions, trials: Sequence[Trial]) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "workers": options.workers,
        "blocks": options.blocks,
        "lookups": options.lookups,
        "seed": options.seed,
        "trials": [asdict(trial) for trial in trials],
    }


def _trial(name: str, python: str, options: IndexOptions) -> Trial:
    print(f"bench: {name}, {options.blocks} blocks", file=sys.stderr, flush=True)
    numbers = (options.workers, options.blocks, options.lookups, options.seed)
    done = subprocess.run(
        [python, "-m", "tests.trials.bench.index.trial", name, *map(str, numbers)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ConfigError(f"{name} could not be measured with {python}: {reason}")
    said = json.loads(done.stdout)
    return Trial(**said | {"lookups": tuple(Lookup(**lookup) for lookup in said["lookups"])})


def _table(trials: Sequence[Trial], options: IndexOptions) -> Table:
    """Ratios are ours over theirs: below 1, ours is the smaller number."""
    ours, *theirs = trials
    title = f"{options.blocks} blocks, {ours.holdings} (block, holder), {options.workers} workers"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for trial in trials:
        table.add_column(f"{trial.subject} {trial.version}", justify="right", no_wrap=True)
    for trial in theirs:
        table.add_column(f"ours / {trial.subject}", justify="right", no_wrap=True)
    for row, what in enumerate(_values(ours)):
        values = [_values(trial)[row][1] for trial in trials]
        ratios = [f"{values[0] / value:.2f}" for value in values[1:]]
        table.add_row(what[0], *(f"{value:.3g}" for value in values), *ratios)
    return table


def _values(trial: Trial) -> list[tuple[str, float]]:
    rows = [
        ("memory, bytes per (block, holder)", trial.bytes_per_holding),
        ("learning, µs per (block, holder)", trial.ingest_s * 1e6),
    ]
    for lookup in trial.lookups:
        whose = "of everybody" if lookup.popular else "of three"
        rows.append((f"lookup of {lookup.depth} blocks {whose}, p50 µs", lookup.p50_s * 1e6))
        rows.append((f"lookup of {lookup.depth} blocks {whose}, p99 µs", lookup.p99_s * 1e6))
    return rows
