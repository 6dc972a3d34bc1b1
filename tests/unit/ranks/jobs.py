"""What ranks do in tests, and a first rank for a process of its own. No torch here: each rank would load it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twostroke.base.errors import ConfigError
from twostroke.kernels.cpu.build import load_kernels
from twostroke.models.catalog.places import cache_dir
from twostroke.ranks.group import RankGroup
from twostroke.ranks.processes import RankCare, RankProcesses
from twostroke.ranks.rank import RankJob

FOREVER_S = 600.0
FROZEN_S = 1.0
"""Ten beats: a process that has nothing to do but to beat comes to one of them on a busy machine."""


@dataclass(frozen=True, slots=True)
class Meetings(RankJob):
    """Each step is a call of a function of this module by its name, with the group."""

    def load(self, group: RankGroup) -> Callable[[Any], None]:
        steps = {step.__name__: step for step in (meet, fail, wait, await_step)}

        def compute(batch: tuple[str, float]) -> None:
            steps[batch[0]](group, batch[1])

        return compute


STEPPED = threading.Event()
"""A step has been computed in this process."""


def meet(group: RankGroup, _: float) -> None:
    STEPPED.set()
    group.meet()


def await_step(group: RankGroup, _: bytes) -> None:
    """Work beside the steps that ends only if these go on meanwhile."""
    assert STEPPED.wait(FOREVER_S)


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
    """Writes the pids of the ranks, and computes a step for each line on stdin, or one that this rank never ends for
    "hang". The number of ranks is on the command line."""
    kernels = load_kernels(cache_dir() / "kernels")
    assert kernels is not None
    processes = RankProcesses(kernels, Meetings(), int(sys.argv[1]), 0, RankCare(FROZEN_S))
    processes.wait_until_ready()
    print(*pids_of_children(), flush=True)
    for line in sys.stdin:
        processes.send(("meet", 0))
        if line.strip() == "hang":
            threading.Event().wait()
        processes.group.meet()
        processes.finish()
        print("computed", flush=True)
    processes.close()


def pids_of_children() -> set[int]:
    """Returns the children of this process, zombies among them."""
    pids: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            pids.update(map(int, (task / "children").read_text().split()))
    return pids
