"""Groups of ranks, each rank a process: `python -m tests.unit.ranks.rank_process RANKS...`, one group after the other.

Ranks are forks of one process, which has loaded torch once for all of them. Each runs all jobs in turn, and writes a
line for every tensor that it got: the ranks of its group, its own, the job, and the digest, or `RankLost` where its
waits were ended.
"""

from __future__ import annotations

import functools
import hashlib
import os
import random
import sys
import time
from collections.abc import Iterator

import torch

from tests.rank_partials import SharedPartials
from twostroke.base.errors import RankLost
from twostroke.kernels.cpu.build import Kernels, load_kernels
from twostroke.models.catalog.places import cache_dir
from twostroke.ranks.group import RankGroup, create_memory

SUMS = (1, 7, 8, 63, 1000, 16_384, 16_385, 100_003)
"""Lengths of sums: odd ones, and ones of a slot of 64 KiB in float32, one more, and several slots."""
GATHERED = ((1, (3, 5, 7, 11)), (3, (1000, 1000, 1000, 1000)), (17, (4096, 1, 2500, 0)), (2, (40_000, 9, 40_000, 3)))
"""Rows, and columns of each rank."""
ROUNDS = 1000
RESIDUAL = 50
"""Seeds what partial sums are added to: the same on all ranks."""


def partial(seed: int, rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of very different sizes: another order of additions has other bits."""
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    numbers = torch.randn(count, generator=generator) * torch.randn(count, generator=generator).mul(4).exp()
    return numbers.to(dtype)


def sum_in_order(partials: list[torch.Tensor]) -> torch.Tensor:
    """The oracle of a sum over ranks."""
    whole = partials[0].float()
    for other in partials[1:]:
        whole = whole + other.float()
    return whole.to(partials[0].dtype)


def digest_of(tensor: torch.Tensor) -> str:
    return hashlib.blake2b(tensor.contiguous().view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()


def sums(group: RankGroup) -> Iterator[torch.Tensor]:
    for dtype in (torch.float32, torch.bfloat16):
        for seed, count in enumerate(SUMS):
            values = partial(seed, group.rank, count, dtype)
            group.all_reduce(values)
            yield values


def partials(group: RankGroup) -> Iterator[torch.Tensor]:
    """Partial sums made in the shared memory, added to what is there."""
    shared = SharedPartials(loaded_kernels(), group)
    for seed, count in enumerate(SUMS[:6]):
        shared.next(count)[:] = partial(seed, group.rank, count, torch.float32)
        values = partial(seed, RESIDUAL, count, torch.float32)
        shared.add(values)
        yield values


def gathers(group: RankGroup) -> Iterator[torch.Tensor]:
    for seed, (rows, columns) in enumerate(GATHERED):
        part = partial(seed, group.rank, rows * columns[group.rank], torch.float32).view(rows, -1)
        whole = group.gather(part, sum(columns[: group.ranks]))
        assert (whole is None) == (group.rank != 0)
        if whole is not None:
            yield whole


def many(group: RankGroup) -> Iterator[torch.Tensor]:
    """Rounds of all kinds in which ranks come early and late."""
    jitter = random.Random(group.rank)
    kinds = random.Random(0)
    total = torch.zeros(64)
    for seed in range(ROUNDS):
        if jitter.random() < 0.02:
            time.sleep(jitter.random() * 2e-3)
        kind, count = kinds.randrange(8), kinds.randrange(1, 64)
        if kind == 0:
            group.meet()
        elif kind == 1:
            group.gather(torch.ones(1, count), count * group.ranks)
        values = torch.full((count,), float(seed % 100 + group.rank))
        group.all_reduce(values)
        total[:count] += values
    yield total


def forever(group: RankGroup) -> Iterator[torch.Tensor]:
    """The last rank never comes. Nobody waits after this."""
    if group.rank == group.ranks - 1:
        time.sleep(0.3)
        group.abort()
    else:
        group.meet()
    yield torch.zeros(1)


JOBS = (sums, partials, gathers, many, forever)


@functools.cache
def loaded_kernels() -> Kernels:
    kernels = load_kernels(cache_dir() / "kernels")
    assert kernels is not None
    return kernels


def main() -> None:
    torch.set_num_threads(1)
    loaded_kernels()
    for ranks in map(int, sys.argv[1:]):
        fd, slot_bytes = create_memory(loaded_kernels(), ranks, 0)
        pids = [_forked(fd, rank, ranks, slot_bytes) for rank in range(ranks)]
        os.close(fd)
        assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * ranks


def _forked(fd: int, rank: int, ranks: int, slot_bytes: int) -> int:
    """Returns the pid of a process that is a rank."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            _run(RankGroup(loaded_kernels(), fd, rank, ranks, slot_bytes))
            status = 0
        finally:
            os._exit(status)
    return pid


def _run(group: RankGroup) -> None:
    def say(job: str, what: str) -> None:
        os.write(1, f"{group.ranks} {group.rank} {job} {what}\n".encode())  # whole lines, beside those of others

    for job in JOBS:
        try:
            for tensor in job(group):
                say(job.__name__, digest_of(tensor))
        except RankLost:
            say(job.__name__, "RankLost")
    group.close()


if __name__ == "__main__":
    main()
