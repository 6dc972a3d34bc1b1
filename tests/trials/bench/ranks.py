"""`python -m tests.trials.bench ranks`: how long a sum over all ranks of a worker takes, beside copying its bytes
twice.

Each rank is a process. A partial sum lies where the product before it has put it: in the shared memory, as in native
steps, or in memory of the rank alone, from where it is copied first. All ranks copy at once, as all take part in a sum
at once, and each uses one thread. Sums and copies take turns, so that a machine that is busy for a while is busy for
both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch

from cluster.flags.checks import file_can_be_made
from tests.rank_partials import SharedPartials
from tests.trials.bench.options import json_file
from tools.output import write_json
from tools.tables import console_for, table_of, text_grid, text_row
from twostroke.base.errors import ConfigError
from twostroke.config import flags
from twostroke.config.settings import Settings, group, setting
from twostroke.kernels.cpu.build import Kernels, load_kernels
from twostroke.models.catalog.places import cache_dir
from twostroke.ranks.group import RankGroup, create_memory

SHAPES = ((16, 576), (512, 1536))
"""Tokens and hidden numbers: a decode step of a small model, and a chunk of a prompt."""
TURN_BYTES = 8 << 20
"""What one turn sums, or copies, again and again: a clock's reading takes nothing beside it."""


class RanksBenchOptions(Settings):
    ranks: int = setting(2, least=2, most=8, help="ranks of the worker, each a process")
    turns: int = setting(200, least=2, help="turns of each shape")
    json_path: str | None = json_file()

    def model_post_init(self, _context: object) -> None:
        file_can_be_made("--json", self.json_path)


class _Flags(Settings):
    options: RanksBenchOptions = group(RanksBenchOptions, "ranks")


@dataclass(slots=True)
class Measured:
    shared: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)
    """Seconds of one sum of each kind, and of copying its bytes twice, in each turn."""

    def ratio(self, sums: list[float]) -> float:
        return statistics.median(sums) / statistics.median(self.copies)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, _Flags)


def run(args: argparse.Namespace) -> int:
    """0. Raises ServeError for bad flags, and where there is no C++ compiler."""
    options = flags.read(_Flags, args).options
    kernels = _kernels()
    fd, slot_bytes = create_memory(kernels, options.ranks, max(4 * rows * width for rows, width in SHAPES))
    command = [sys.executable, "-m", "tests.trials.bench.ranks", str(fd), str(slot_bytes), str(options.ranks)]
    others = [
        subprocess.Popen([*command, str(rank), str(options.turns)], pass_fds=[fd]) for rank in range(1, options.ranks)
    ]
    results = _measure(kernels, RankGroup(kernels, fd, 0, options.ranks, slot_bytes), options.turns)
    for other in others:
        other.wait()
    rows = [
        text_row(
            name,
            *(f"{1e6 * statistics.median(each):.1f}" for each in (of.shared, of.own, of.copies)),
            f"{of.ratio(of.shared):.2f}",
            f"{of.ratio(of.own):.2f}",
            f"{min(of.shared) / min(of.copies):.2f}",
            f"{min(of.own) / min(of.copies):.2f}",
        )
        for name, of in results.items()
    ]
    headings = ("float32", "shared, µs", "own, µs", "two copies, µs", "shared over", "own over", "of least", "of least")
    console_for(options.json_path).print(table_of(text_grid(headings, rows), f"{options.ranks} ranks, medians"))
    write_json({name: asdict(each) for name, each in results.items()}, options.json_path)
    return 0


def _kernels() -> Kernels:
    kernels = load_kernels(cache_dir() / "kernels")
    if kernels is None:
        raise ConfigError("sums over ranks need the native kernels, and there is no C++ compiler")
    return kernels


def _measure(kernels: Kernels, group: RankGroup, turns: int) -> dict[str, Measured]:
    torch.set_num_threads(1)
    partials = SharedPartials(kernels, group)
    results = {}
    for rows, width in SHAPES:
        values, other = torch.zeros(rows, width), torch.zeros(rows, width)
        times = max(1, TURN_BYTES // values.nbytes)

        def add_shared(values: torch.Tensor = values) -> None:
            partials.add(values)

        def add_own(values: torch.Tensor = values) -> None:
            group.all_reduce(values)

        def copy_twice(values: torch.Tensor = values, other: torch.Tensor = other) -> None:
            other.copy_(values)
            values.copy_(other)

        measured = Measured()
        kinds = ((add_shared, measured.shared), (add_own, measured.own), (copy_twice, measured.copies))
        for turn in range(turns + 1):
            for call, seconds in kinds:
                group.meet()
                taken_s = _seconds(call, times)
                if turn:
                    seconds.append(taken_s)
        results[f"[{rows}, {width}]"] = measured
    group.meet()
    group.close()
    return results


def _seconds(call: Callable[[], None], times: int) -> float:
    started_s = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - started_s) / times


def _other_rank() -> None:
    """Takes part from a process of its own; its parent's end is its own, as it then waits for nobody."""
    fd, slot_bytes, ranks, rank, turns = map(int, sys.argv[1:])
    os.set_inheritable(fd, False)
    kernels = _kernels()
    _measure(kernels, RankGroup(kernels, fd, rank, ranks, slot_bytes), turns)


if __name__ == "__main__":
    _other_rank()
