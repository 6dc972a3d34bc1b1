"""`python -m tests.trials.bench sweep`: is choosing request by request who computes a prompt as good as the better
fixed rule?

Prompt length x load x bandwidth; in every cell three variants under the same requests: the decode worker always
computes, a prefill worker always does, and ours chooses.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from cluster.flags.checks import field_of, positive
from cluster.scaling.capacity import first_tokens_alone_s
from cluster.values.worker_counts import LatencyTargets
from tools.figures.charts import Figure, Head, Line, Section, Words, line_figure, render
from tools.output import write_json, write_text
from tools.simulate.fleet import results
from tools.simulate.fleet.shape import FleetShape
from tools.simulate.options import GIGABYTE, FleetFlags, Output, numbers
from tools.simulate.planning.demand import capacity_of, check_objectives, load_of
from tools.simulate.runs import Runner, Trial, runner
from tools.simulate.traces.formats import TraceRow
from tools.simulate.traces.trace import Trace
from tools.simulate.variants import ALWAYS_LOCAL, ALWAYS_REMOTE, OURS
from tools.tables import Grid, console_for, table_of, text_grid, text_row
from twostroke.base.errors import ConfigError
from twostroke.config import flags
from twostroke.config.settings import Settings, group

VARIANTS = (ALWAYS_LOCAL, ALWAYS_REMOTE, OURS)
BLOCK_TOKENS = 128
"""Short prompts must have some."""
SLACK = 4.0
"""Objectives where none are given: this many times what an empty fleet takes; its steps, with a dozen streams."""
STREAMS = 12
LEAST_SHARE = 0.1
"""Least share of requests in time by the better fixed rule: in cells below, a handful of requests makes the ratio."""
SMALL = 2
"""Workers of each role where none are given: a cell is a short run, which a large fleet would hardly notice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    prompt_tokens: tuple[int, ...]
    loads: tuple[float, ...]
    """Prefill seconds offered over those of all prefill workers."""
    bandwidths: tuple[float, ...]
    """Bytes per second."""

    def __post_init__(self) -> None:
        for flag, values in (
            ("--prompt-tokens", self.prompt_tokens),
            ("--loads", self.loads),
            ("--bandwidths", self.bandwidths),
        ):
            if not values:
                raise ConfigError(f"{flag} needs a number", field=field_of(flag))
            for value in values:
                positive(flag, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of one cell on the axes."""

    prompt_tokens: int
    load: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    place: Place
    requests_per_s: float
    promise: LatencyTargets
    goodput: dict[str, float]
    """Goodput by variant."""

    @property
    def ratio(self) -> float:
        """Ours over the better of the fixed rules; 1 where nobody keeps a promise."""
        return self.goodput[OURS] / self.better if self.better else 1.0

    @property
    def better(self) -> float:
        return max(self.goodput[ALWAYS_LOCAL], self.goodput[ALWAYS_REMOTE])

    @property
    def is_telling(self) -> bool:
        return self.better >= LEAST_SHARE * self.requests_per_s


class _Flags(Settings):
    fleet: FleetFlags = group(FleetFlags, "fleet", "which fleet")
    output: Output = group(Output, "output")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    axes = parser.add_argument_group("axes")
    axes.add_argument("--prompt-tokens", default="512,2048,8192,32768", metavar="N[,N]", help="default: %(default)s")
    axes.add_argument("--loads", default="0.3,0.6,0.9,1.2", metavar="X[,X]", help="of prefill workers (%(default)s)")
    axes.add_argument("--bandwidths", default="0.3,2,12.5", metavar="GB/S[,..]", help="default: %(default)s")
    axes.add_argument("--output-tokens", type=int, default=200, metavar="N", help="on average (default: %(default)s)")
    axes.add_argument("--requests", type=int, default=300, metavar="N", help="of each run (default: %(default)s)")
    axes.add_argument("--slo-ttft", type=float, metavar="S", help=f"default: {SLACK:g} times an empty fleet's")
    axes.add_argument("--slo-itl", type=float, metavar="S", help=f"default: a step's with {STREAMS} streams, twice")
    axes.add_argument("--seed", type=int, default=0, help="of all draws (default: %(default)s)")
    flags.add(parser, _Flags)


def run(args: argparse.Namespace) -> int:
    axes = _axes(args)
    said = flags.read(_Flags, args)
    output = said.output
    if args.requests < 2:
        raise ConfigError(f"--requests must be at least 2, got {args.requests}", field="requests")
    positive("--output-tokens", args.output_tokens)
    shape = _small(said.fleet.shape(BLOCK_TOKENS, args.seed), args)
    if not shape.prefill:
        raise ConfigError("--prefill must be at least 1: who else should compute?", field="prefill")
    asked = LatencyTargets(ttft_s=args.slo_ttft, itl_s=args.slo_itl)
    with runner(output.processes) as run_all:
        cells = sweep(axes, shape, asked, (args.requests, args.output_tokens), run_all)
    _show(cells, shape, output)
    return 0


def sweep(axes: Axes, shape: FleetShape, asked: LatencyTargets, sizes: tuple[int, int], run_all: Runner) -> list[Cell]:
    """`sizes`: requests of a run, and tokens of an answer. Cells in the order of the axes."""
    places = [
        Place(prompt_tokens=tokens, load=load, bytes_per_s=bandwidth)
        for tokens, load, bandwidth in itertools.product(axes.prompt_tokens, axes.loads, axes.bandwidths)
    ]
    fleets = [dataclasses.replace(shape, link_bytes_per_s=place.bytes_per_s) for place in places]
    traces = [requests_at(place, fleet, *sizes) for place, fleet in zip(places, fleets, strict=True)]
    _check_objectives(asked, traces, fleets)
    trials = [
        Trial(variant=variant, trace=trace, shape=fleet)
        for trace, fleet in zip(traces, fleets, strict=True)
        for variant in VARIANTS
    ]
    runs = iter(run_all(trials))
    return [
        _cell(place, trace, _promised(asked, trace, fleet), [next(runs) for _ in VARIANTS])
        for place, trace, fleet in zip(places, traces, fleets, strict=True)
    ]


def _check_objectives(asked: LatencyTargets, traces: Sequence[Trace], fleets: Sequence[FleetShape]) -> None:
    """Raises ConfigError where no cell's requests can meet them."""
    refusals = []
    for trace, fleet in zip(traces, fleets, strict=True):
        try:
            return check_objectives(trace, fleet, asked)
        except ConfigError as refusal:
            refusals.append(refusal)
    raise refusals[0]


def requests_at(place: Place, shape: FleetShape, requests: int, output_tokens: int) -> Trace:
    """Poisson arrivals of prompts that share nothing, their lengths within a quarter of the place's."""
    draws = random.Random(f"sweep {shape.seed} {place.prompt_tokens} {place.load}")
    own_s = shape.cost.of_prompt(place.prompt_tokens, 0, shape.step_tokens)
    rate = place.load * max(1, shape.prefill) / own_s
    size = shape.block_size
    at_s, block, rows = 0.0, 0, []
    for _ in range(requests):
        at_s += draws.expovariate(rate)
        tokens = max(1, round(place.prompt_tokens * draws.uniform(0.75, 1.25)))
        blocks = -(-tokens // size)
        answer = max(1, round(draws.uniform(0.5, 1.5) * output_tokens))
        rows.append(TraceRow(at_s, tokens, answer, tuple(range(block, block + blocks))))
        block += blocks
    return Trace("sweep", size, tuple(rows))


def _promised(asked: LatencyTargets, trace: Trace, shape: FleetShape) -> LatencyTargets:
    alone = sorted(first_tokens_alone_s(load_of(trace, 1), capacity_of(shape)))
    step_s = shape.cost.of_streams(STREAMS, STREAMS * trace.rows[0].input_tokens)
    return LatencyTargets(
        ttft_s=asked.ttft_s if asked.ttft_s is not None else SLACK * alone[len(alone) // 2],
        itl_s=asked.itl_s if asked.itl_s is not None else 2 * step_s,
    )


def _cell(place: Place, trace: Trace, promise: LatencyTargets, runs: Sequence[results.SimulatedRun]) -> Cell:
    return Cell(
        place=place,
        requests_per_s=len(trace.rows) / (trace.rows[-1].timestamp_s - trace.rows[0].timestamp_s),
        promise=promise,
        goodput={run.policy: results.goodput(run, promise.ttft_s, promise.itl_s) for run in runs},
    )


def _small(shape: FleetShape, args: argparse.Namespace) -> FleetShape:
    return dataclasses.replace(
        shape,
        prefill=SMALL if args.prefill is None else shape.prefill,
        decode=SMALL if args.decode is None else shape.decode,
    )


def _axes(args: argparse.Namespace) -> Axes:
    return Axes(
        prompt_tokens=tuple(int(value) for value in numbers("--prompt-tokens", args.prompt_tokens)),
        loads=numbers("--loads", args.loads),
        bandwidths=tuple(GIGABYTE * value for value in numbers("--bandwidths", args.bandwidths)),
    )


def _show(cells: Sequence[Cell], shape: FleetShape, output: Output) -> None:
    console = console_for(output.json_path)
    setting = (
        f"{shape.prefill} prefill + {shape.decode} decode workers; goodput in requests/s under each cell's objectives"
    )
    _print(cells, setting, console)
    write_json({"schema_version": 1, "setting": setting, **_as_json(cells)}, output.json_path)
    if output.html_path is not None:
        write_text(_page(cells, setting), output.html_path)


def _print(cells: Sequence[Cell], setting: str, console: Console) -> None:
    console.print(setting, markup=False)
    console.print(table_of(_grid(cells)))
    console.print(verdict(cells), markup=False)


def verdict(cells: Sequence[Cell]) -> str:
    telling = _telling(cells)
    if not telling:
        return f"no fixed rule serves {LEAST_SHARE:.0%} of requests in time in any cell"
    worst = min(telling, key=lambda cell: cell.ratio)
    place = worst.place
    left_out = len(cells) - len(telling)
    median = results.percentile([cell.ratio for cell in telling], 0.5)
    return (
        f"worst: {worst.ratio:.3f} of the better fixed rule, at {place.prompt_tokens} tokens, load {place.load:g}, "
        f"{place.bytes_per_s / GIGABYTE:g} GB/s; median {median:.3f}; "
        f"{left_out} of {len(cells)} cells left out, where neither rule serves {LEAST_SHARE:.0%} in time"
    )


def _telling(cells: Sequence[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell.is_telling]


_HEADINGS = ("prompt", "load", "GB/s", "requests/s", "TTFT <=", "ITL <=", *VARIANTS, f"{OURS} / better")


def _cells(cell: Cell) -> tuple[str, ...]:
    place = cell.place
    return (
        str(place.prompt_tokens),
        f"{place.load:g}",
        f"{place.bytes_per_s / GIGABYTE:g}",
        f"{cell.requests_per_s:.2f}",
        f"{cell.promise.ttft_s:.3g}",
        f"{cell.promise.itl_s:.3g}",
        *(f"{cell.goodput[variant]:.3f}" for variant in VARIANTS),
        f"{cell.ratio:.3f}",
    )


def _grid(cells: Sequence[Cell]) -> Grid:
    return text_grid(_HEADINGS, (text_row(*_cells(cell)) for cell in cells))


def _as_json(cells: Sequence[Cell]) -> dict[str, Any]:
    return {
        "cells": [{**dataclasses.asdict(cell), "ratio": cell.ratio, "is_telling": cell.is_telling} for cell in cells],
        "worst_ratio": min((cell.ratio for cell in _telling(cells)), default=None),
    }


def _page(cells: Sequence[Cell], setting: str) -> str:
    figures = []
    for tokens, bandwidth in dict.fromkeys((cell.place.prompt_tokens, cell.place.bytes_per_s) for cell in cells):
        here = [c for c in cells if (c.place.prompt_tokens, c.place.bytes_per_s) == (tokens, bandwidth)]
        lines = [
            Line(colour, tuple((cell.place.load, cell.goodput[variant]) for cell in here), name=variant)
            for colour, variant in enumerate(VARIANTS)
        ]
        title = f"{tokens} tokens, {bandwidth / GIGABYTE:g} GB/s"
        figures.append(
            Figure(title, line_figure(lines, Words(title, "load of prefill workers", "goodput, requests/s")))
        )
    return render(
        Head("tests.trials.bench sweep", setting, VARIANTS),
        [Section("Who computes", verdict(cells), figures=tuple(figures)), Section("All cells", grid=_grid(cells))],
    )
