"""What ranks do in tests, and a first rank for a process of its own."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from twostroke.errors import ConfigError
from twostroke.kernels.cpu.build import load_kernels
from twostroke.models.catalog.places import cache_dir
from twostroke.ranks.group import RankGroup
from twostroke.ranks.processes import RankProcesses
from twostroke.ranks.rank import RankJob

FOREVER_S = 600.0


@dataclass(frozen=True, slots=True)
class Sums(RankJob):
    """Each step is a call of a function of this module by its name, with the group."""

    scale: float = 1.0

    def load(self, group: RankGroup) -> Callable[[Any], None]:
        steps = {step.__name__: step for step in (add, meet, fail, wait)}

        def compute(batch: tuple[str, float]) -> None:
            steps[batch[0]](group, batch[1] * self.scale)

        return compute


def add(group: RankGroup, value: float) -> torch.Tensor:
    """Return the sum of value * (rank + 1) over all ranks."""
    values = torch.full((5,), value * (group.rank + 1))
    group.all_reduce(values)
    return values


def meet(group: RankGroup, _: float) -> None:
    group.meet()


def fail(group: RankGroup, value: float) -> None:
    if group.rank == value:
        raise ValueError("this step is too much")
    group.meet()


def wait(group: RankGroup, value: float) -> None:
    """One rank computes, and the others wait for it."""
    if group.rank == value:
        time.sleep(FOREVER_S)
    group.meet()


@dataclass(frozen=True, slots=True)
class CannotLoad(RankJob):
    def load(self, group: RankGroup) -> Callable[[Any], None]:
        raise ConfigError("the weights are not there")


@dataclass(frozen=True, slots=True)
class LoadsForever(RankJob):
    def load(self, group: RankGroup) -> Callable[[Any], None]:
        time.sleep(FOREVER_S)
        raise AssertionError


@dataclass(frozen=True, slots=True)
class WritesTo(RankJob):
    """It gets a descriptor."""

    fd: int

    def load(self, group: RankGroup) -> Callable[[Any], None]:
        os.write(self.fd, str(group.rank).encode())
        return lambda batch: None


def main() -> None:
    """Write the pids of the ranks, and compute a step for each line on stdin, or one that this rank never ends for
    "hang". The number of ranks is on the command line."""
    kernels = load_kernels(cache_dir() / "kernels")
    assert kernels is not None
    processes = RankProcesses(kernels, Sums(), int(sys.argv[1]), 0)
    processes.wait_until_ready()
    print(*_children(), flush=True)
    for line in sys.stdin:
        if line.strip() == "hang":
            processes.send(("meet", 0))
            threading.Event().wait()
        processes.send(("add", 1.0))
        print(add(processes.group, 1.0)[0].item(), flush=True)
        processes.finish()
    processes.close()


def _children() -> list[str]:
    return [pid for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()]
