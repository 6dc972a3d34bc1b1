"""`python -m tests.trials.bench dynamo`: our port of Dynamo's policy, and ours, beside Dynamo's own replay.

Both simulators get the same requests at the same times, and the same length for every step (`timing`). Moving pages
and calls takes no time. Prompts are cut to whole blocks, because a decode worker here computes the end of a prompt and
Dynamo's does not.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.scaling.capacity import first_tokens_alone_s
from tests.trials.bench.dynamo import their_replay
from tests.trials.bench.dynamo.timing import TIMINGS, Timing
from tests.trials.bench.grid import Axes as GridAxes
from tests.trials.bench.grid import pace_of, requests_of
from tools.output import JsonFile, write_json
from tools.simulate.fleet import results
from tools.simulate.fleet.results import SimulatedRun
from tools.simulate.fleet.shape import Delays, FleetShape
from tools.simulate.options import numbers, with_blocks_of
from tools.simulate.planning.demand import capacity_of, load_of
from tools.simulate.runs import Runner, Trial, paced, runner
from tools.simulate.traces.trace import Trace
from tools.simulate.variants import OURS
from tools.tables import console_for, table_of, text_grid, text_row
from twostroke.base.errors import ConfigError
from twostroke.config import flags
from twostroke.config.settings import Settings, group, setting

PORT = "dynamo"
"""Our port of its policy."""
ENDLESS_BYTES_PER_S = 1e15
"""Rate of links that take no time. Dynamo's replay moves whole prompts, one beside the other, after their last step."""
NEAR = 0.01
"""First tokens that are no farther apart count as equal."""


class _Axes(Settings):
    """What is compared."""

    python: str = setting(..., unit="FILE", help="a Python that has ai-dynamo-runtime")
    traces: str = setting(..., unit="NAME[,NAME]", help="files; FILE@S delays each request by up to S seconds")
    size: int = setting(8, least=1, help="workers of each role")
    timing: str = setting("fixed", unit="NAME", help=f"length of steps: {', '.join(TIMINGS)}")
    loads: str = setting("0.3,0.5,0.8", unit="X[,X]", help="as with `grid`")
    requests: int = setting(2000, least=2, help="the first N requests of each trace")
    rounds: int = setting(3, least=1, help="replays of each cell: Dynamo draws among equal workers, without a seed")
    seed: int = setting(0, help="seed of all draws")


class _Flags(Settings):
    axes: _Axes = group(_Axes, "axes")
    output: JsonFile = group(JsonFile, "output")


@dataclass(frozen=True, slots=True)
class Played:
    """What one simulator made of the requests of a cell, in their order."""

    ttfts_s: tuple[float, ...]
    reuse: float
    """Share of prompt tokens that were found in a cache. The last block of a prompt that is there whole counts as
    computed: Dynamo's engine runs it again."""

    @property
    def mean_s(self) -> float:
        return statistics.fmean(self.ttfts_s)

    @property
    def p90_s(self) -> float:
        return results.percentile(self.ttfts_s, 0.9) or 0.0


@dataclass(frozen=True, slots=True)
class Cell:
    trace: str
    load: float
    alone_s: tuple[float, ...]
    """First tokens if each request had the fleet for itself, and found what one cache of all prefill workers' pages
    would hold. What decode workers hold besides can make some of them earlier; a better placement cannot."""
    theirs: tuple[Played, ...]
    port: Played
    ours: Played

    @property
    def alone(self) -> Played:
        return Played(self.alone_s, 0.0)

    @property
    def p90_s(self) -> float:
        """Dynamo's p90 in its median round, as the next two."""
        return statistics.median(each.p90_s for each in self.theirs)

    @property
    def mean_s(self) -> float:
        return statistics.median(each.mean_s for each in self.theirs)

    @property
    def reuse(self) -> float:
        return statistics.median(each.reuse for each in self.theirs)

    @property
    def equal_share(self) -> float:
        """Share of requests whose first token comes when it came in Dynamo's first round."""
        pairs = list(zip(self.port.ttfts_s, self.theirs[0].ttfts_s, strict=True))
        return sum(abs(one - other) <= NEAR * other for one, other in pairs) / len(pairs)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, _Flags)


def run(args: argparse.Namespace) -> int:
    """Raises ConfigError for bad flags and files, and where the other Python has no replay."""
    said = flags.read(_Flags, args)
    with runner(2) as run_all:
        cells = list(cells_of(said.axes, run_all))
    console_for(said.output.json_path).print(
        table_of(text_grid(_HEADINGS, (text_row(*_texts(each)) for each in cells)))
    )
    write_json({"schema_version": 1, "cells": list(map(dataclasses.asdict, cells))}, said.output.json_path)
    return 0


def cells_of(axes: _Axes, run_all: Runner) -> Iterator[Cell]:
    loads = numbers("--loads", axes.loads)
    for name, load in itertools.product(axes.traces.split(","), loads):
        read = requests_of(name, axes.size, GridAxes(traces=name, requests=axes.requests, seed=axes.seed))
        trace = in_whole_blocks(read)
        timing, shape = fleet_of(axes.size, trace.block_tokens, axes.seed, timing_of(axes.timing))
        trace = paced(trace, pace_of(load, trace, shape))
        port, ours = run_all(
            [Trial(variant=variant, trace=trace, shape=shape, lengths=timing.lengths) for variant in (PORT, OURS)]
        )
        theirs = tuple(replayed_by(axes.python, trace, shape, timing) for _ in range(axes.rounds))
        alone_s = tuple(first_tokens_alone_s(load_of(trace, shape.prefill * shape.prefill_pages), capacity_of(shape)))
        short = Path(name.partition("@")[0]).stem
        yield Cell(short, load, alone_s, theirs, played(port, shape), played(ours, shape))


def timing_of(name: str) -> Callable[[FleetShape], Timing]:
    if name not in TIMINGS:
        raise ConfigError(f"--timing must be of {', '.join(TIMINGS)}; got {name!r}", field="timing")
    return TIMINGS[name]


def fleet_of(
    size: int, block_tokens: int, seed: int, timing_for: Callable[[FleetShape], Timing]
) -> tuple[Timing, FleetShape]:
    """Returns what steps take, and a fleet whose workers know it, as far as costs can say it."""
    nothing = Delays(frontend_s=0.0, open_s=0.0, pull_s=0.0, token_s=0.0, event_s=0.0)
    shape = FleetShape(prefill=size, decode=size, link_bytes_per_s=ENDLESS_BYTES_PER_S, delays=nothing, seed=seed)
    shape = with_blocks_of(shape, block_tokens)
    timing = timing_for(shape)
    return timing, dataclasses.replace(shape, cost=timing.cost, step_target_s=timing.step_target_s)


def in_whole_blocks(trace: Trace) -> Trace:
    size = trace.block_tokens
    rows = []
    for row in trace.rows:
        blocks = max(1, row.input_tokens // size)
        rows.append(dataclasses.replace(row, input_tokens=blocks * size, blocks=row.blocks[:blocks]))
    return dataclasses.replace(trace, rows=tuple(rows))


def replayed_by(python: str, trace: Trace, shape: FleetShape, timing: Timing) -> Played:
    """Plays a trace in Dynamo's replay. Raises ConfigError, quoting what the other Python said."""
    with tempfile.TemporaryDirectory() as folder:
        rows, asked, answers = (Path(folder) / name for name in ("trace.jsonl", "asked.json", "answers.json"))
        rows.write_text("".join(_lines(trace)), encoding="utf-8")
        asked.write_text(json.dumps(asked_of(shape, timing, rows, answers)), encoding="utf-8")
        script = str(Path(their_replay.__file__).resolve())
        try:
            ran = subprocess.run([python, script, str(asked)], capture_output=True, text=True, check=False)
        except OSError as error:
            raise ConfigError(f"--python {python}: {error.strerror}", field="python") from error
        if ran.returncode:
            raise ConfigError(f"--python {python}: its replay failed: {ran.stderr[-500:].strip()}", field="python")
        return played_there(json.loads(answers.read_text(encoding="utf-8")))


def asked_of(shape: FleetShape, timing: Timing, rows: Path, answers: Path) -> dict[str, Any]:
    """Returns what `their_replay` reads."""
    return {
        "trace": str(rows),
        "answers": str(answers),
        "prefill": shape.prefill,
        "decode": shape.decode,
        "block_tokens": shape.block_size,
        "prefill_pages": shape.prefill_pages,
        "decode_pages": shape.decode_pages,
        "max_num_seqs": shape.max_num_seqs,
        "step_tokens": shape.step_tokens,
        "timing_model": timing.theirs,
    }


def played_there(answers: Sequence[dict[str, Any]]) -> Played:
    asked, reused = (sum(each[name] for each in answers) for name in ("tokens", "reused_tokens"))
    return Played(tuple(each["ttft_s"] for each in answers), reused / asked)


def played(run: SimulatedRun, shape: FleetShape) -> Played:
    size, asked, reused = shape.block_size, 0, 0
    for each in run.outcomes:
        asked += each.prompt_tokens
        reused += min(each.cached_tokens, (each.prompt_tokens - 1) // size * size)
    return Played(tuple(results.ttfts(run)), reused / asked)


def _lines(trace: Trace) -> Iterator[str]:
    """Yields Mooncake's lines. Numbers of blocks are given anew: theirs begin at 0."""
    numbers: dict[int, int] = {}
    for row in trace.rows:
        said = {
            "timestamp": 1e3 * row.timestamp_s,
            "input_length": row.input_tokens,
            "output_length": row.output_tokens,
            "hash_ids": [numbers.setdefault(block, len(numbers)) for block in row.blocks],
        }
        yield json.dumps(said) + "\n"


_HEADINGS = (
    *("trace", "load", "their p90 s", "mean s", "reuse", "alone p90", "mean"),
    *("port p90", "mean", "reuse", "equal", "ours p90", "mean", "reuse"),
)


def _texts(cell: Cell) -> tuple[str, ...]:
    alone, port, ours = cell.alone, cell.port, cell.ours
    return (
        *(cell.trace, f"{cell.load:g}", f"{cell.p90_s:.3f}", f"{cell.mean_s:.3f}", f"{cell.reuse:.4f}"),
        *(f"{alone.p90_s / cell.p90_s:.3f}x", f"{alone.mean_s / cell.mean_s:.3f}x"),
        *(f"{port.p90_s / cell.p90_s:.3f}x", f"{port.mean_s / cell.mean_s:.3f}x", f"{port.reuse:.4f}"),
        f"{cell.equal_share:.0%}",
        *(f"{ours.p90_s / cell.p90_s:.3f}x", f"{ours.mean_s / cell.mean_s:.3f}x", f"{ours.reuse:.4f}"),
    )
