"""`python -m tests.trials.bench grid`: is ours at least as good as the best rival, whatever the fleet's size and load?

Trace x fleet's size x load; in every cell all policies get the same requests. A cell is won where p90 and mean time to
first token of ours are not above the best rival's, and where its hits are near the oracle's.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.flags.checks import field_of, positive
from cluster.scaling.capacity import prefill_workers_busy
from cluster.values.worker_counts import LatencyTargets
from tools.output import write_json
from tools.simulate.fleet.shape import FleetShape
from tools.simulate.options import LinkedFleetFlags, Output, RequestSource, numbers
from tools.simulate.planning.demand import capacity_of, load_of
from tools.simulate.reports.report import percent, seconds
from tools.simulate.reports.summary import Summary, oracle_rate_of, summarise
from tools.simulate.runs import Runner, Trial, runner
from tools.simulate.traces.trace import Trace
from tools.simulate.traces.workloads import WORKLOADS
from tools.simulate.variants import OURS, variants_from
from tools.tables import Grid, console_for, table_of, text_grid, text_row
from twostroke.base.errors import ConfigError
from twostroke.config import flags
from twostroke.config.settings import Settings, group, setting

LEAST_HITS = 0.95
"""Share of the oracle's hits that a cell asks for."""
WORKLOAD_RATE = 0.4
"""Requests per second and prefill worker at which generated requests come before their pace is set: sessions then pause
about as long as they should."""
NO_PROMISE = LatencyTargets(ttft_s=None, itl_s=None)


class Axes(Settings):
    """The cells, and what is compared in each."""

    traces: str = setting(
        ..., unit="NAME[,NAME]", help=f"files, or generated: {', '.join(WORKLOADS)}; FILE@S delays by up to S seconds"
    )
    sizes: str = setting("4,8,50,500", unit="N[,N]", help="workers of each role")
    loads: str = setting(
        "0.3,0.6,0.9", unit="X[,X]", help="prefill seconds that perfect reuse leaves, over those of all prefill workers"
    )
    policies: str = setting("all", unit="NAMES", help='rivals with commas between them, or "all"')
    requests: int = setting(3000, least=2, help="the first N requests of each trace")
    seed: int = setting(0, help="seed of all draws")

    def model_post_init(self, _context: Any) -> None:
        for flag, values in (("--sizes", self.all_sizes), ("--loads", self.all_loads)):
            if not values:
                raise ConfigError(f"{flag} needs a number", field=field_of(flag))
            for value in values:
                positive(flag, value)
        if not self.rivals:
            raise ConfigError(f"--policies needs a rival of {OURS}", field="policies")

    @property
    def all_sizes(self) -> tuple[int, ...]:
        return tuple(int(value) for value in numbers("--sizes", self.sizes))

    @property
    def all_loads(self) -> tuple[float, ...]:
        return numbers("--loads", self.loads)

    @property
    def rivals(self) -> tuple[str, ...]:
        """The policies of other systems; variants of ours are none."""
        return tuple(name for name in variants_from(self.policies) if not name.startswith(OURS))


class _Flags(Settings):
    axes: Axes = group(Axes, "axes")
    fleet: LinkedFleetFlags = group(LinkedFleetFlags, "fleet", "what all fleets share")
    output: Output = group(Output, "output")


@dataclass(frozen=True, slots=True)
class Place:
    """The place of one cell on the axes."""

    trace: str
    size: int
    """Workers of each role."""
    load: float


@dataclass(frozen=True, slots=True)
class Rivalry:
    """Ours beside the best rival, in one number of which less is better."""

    rival: str
    ratio: float


@dataclass(frozen=True, slots=True)
class Cell:
    place: Place
    ours: Summary
    rivals: tuple[Summary, ...]

    @property
    def p90(self) -> Rivalry:
        """The p90 time to first token."""
        return self._rivalry(lambda run: run.ttft_p90_s)

    @property
    def mean(self) -> Rivalry:
        """The mean time to first token."""
        return self._rivalry(lambda run: run.ttft_mean_s)

    @property
    def is_won(self) -> bool:
        share = self.ours.oracle_share
        return self.p90.ratio <= 1 and self.mean.ratio <= 1 and (share is None or share >= LEAST_HITS)

    def _rivalry(self, seconds_of: Callable[[Summary], float | None]) -> Rivalry:
        """Rivals that did not complete every request are left out: refusing makes the rest fast."""
        times_s = {run.variant: seconds_of(run) for run in self.rivals if run.completed == run.requests}
        known = {name: time_s for name, time_s in times_s.items() if time_s}
        own_s = seconds_of(self.ours) if self.ours.completed == self.ours.requests else None
        if own_s is None:
            return Rivalry("-", float("inf"))
        if not known:
            return Rivalry("-", 0.0)
        best = min(known, key=lambda name: known[name])
        return Rivalry(best, own_s / known[best])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, _Flags)


def run(args: argparse.Namespace) -> int:
    """Prints every cell when it is done: some take minutes. Raises ConfigError for bad flags and files."""
    said = flags.read(_Flags, args)
    console = console_for(said.output.json_path)
    cells = []
    with runner(said.output.processes) as run_all:
        for cell in cells_of(said.axes, said.fleet, run_all):
            cells.append(cell)
            console.print(_line(cell), markup=False)
    console.print(table_of(_grid(cells)))
    console.print(verdict(cells), markup=False)
    write_json(_as_json(cells), said.output.json_path)
    return 0


def cells_of(axes: Axes, fleet: LinkedFleetFlags, run_all: Runner) -> Iterator[Cell]:
    """Yields the cells in the order of the axes, each when it is done."""
    for name, size in itertools.product(axes.traces.split(","), axes.all_sizes):
        trace = requests_of(name, size, axes)
        shape = dataclasses.replace(fleet.shape(trace.block_tokens, axes.seed), prefill=size, decode=size)
        for load in axes.all_loads:
            yield _cell(Place(_short(name), size, load), trace, shape, axes.rivals, run_all)


def requests_of(name: str, size: int, axes: Axes) -> Trace:
    """Reads a trace's first requests, or generates as many."""
    file, _, jitter = name.partition("@")
    if file in WORKLOADS:
        source = RequestSource(workload=file, limit=axes.requests, rate=WORKLOAD_RATE * size, seed=axes.seed)
    else:
        (jitter_s,) = numbers("--traces", jitter) or (0.0,)
        source = RequestSource(trace=file, limit=axes.requests, jitter_s=jitter_s, seed=axes.seed)
    return source.read()


def pace_of(load: float, trace: Trace, shape: FleetShape) -> float:
    """Returns the rate scale at which the oracle's misses take this share of all prefill workers' time."""
    busy = prefill_workers_busy(load_of(trace, shape.prefill * shape.prefill_pages), capacity_of(shape))
    return load * shape.prefill / busy


def _cell(place: Place, trace: Trace, shape: FleetShape, rivals: Sequence[str], run_all: Runner) -> Cell:
    scale, oracle = pace_of(place.load, trace, shape), oracle_rate_of(trace, shape)
    trials = [Trial(variant=name, trace=trace, shape=shape, rate_scale=scale) for name in (OURS, *rivals)]
    ours, *others = (summarise(run, scale, NO_PROMISE, oracle) for run in run_all(trials))
    return Cell(place, ours, tuple(others))


def _short(name: str) -> str:
    return Path(name.partition("@")[0]).stem


_HEADINGS = (
    *("trace", "workers", "load", "requests", "/s", "util"),
    *("p90 s", "best rival", "ratio", "mean s", "best rival", "ratio", "of oracle", "ITL p99", "won"),
)


def _texts(cell: Cell) -> tuple[str, ...]:
    place, ours = cell.place, cell.ours
    return (
        *(place.trace, f"{place.size}+{place.size}", f"{place.load:g}", str(ours.requests)),
        *(f"{ours.requests_per_s:.1f}", f"{ours.utilisation:.2f}"),
        *(seconds(ours.ttft_p90_s), cell.p90.rival, f"{cell.p90.ratio:.3f}x"),
        *(seconds(ours.ttft_mean_s), cell.mean.rival, f"{cell.mean.ratio:.3f}x"),
        *(percent(ours.oracle_share), seconds(ours.itl_p99_s), "yes" if cell.is_won else "no"),
    )


def _line(cell: Cell) -> str:
    return "  ".join(f"{heading}={text}" for heading, text in zip(_HEADINGS, _texts(cell), strict=True))


def _grid(cells: Sequence[Cell]) -> Grid:
    return text_grid(_HEADINGS, (text_row(*_texts(cell)) for cell in cells))


def verdict(cells: Sequence[Cell]) -> str:
    p90, mean = max(cell.p90.ratio for cell in cells), max(cell.mean.ratio for cell in cells)
    hits = min((cell.ours.oracle_share for cell in cells if cell.ours.oracle_share is not None), default=None)
    return (
        f"{sum(cell.is_won for cell in cells)} of {len(cells)} cells won; worst p90 {p90:.3f}x and mean {mean:.3f}x "
        f"of the best rival, least hits {percent(hits)} of the oracle's"
    )


def _as_json(cells: Sequence[Cell]) -> dict[str, Any]:
    rows = [
        {
            **dataclasses.asdict(cell),
            "p90": dataclasses.asdict(cell.p90),
            "mean": dataclasses.asdict(cell.mean),
            "is_won": cell.is_won,
        }
        for cell in cells
    ]
    return {"schema_version": 1, "cells": rows}
