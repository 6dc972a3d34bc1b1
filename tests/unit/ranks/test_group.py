"""Sums over ranks have the oracle's bits on every rank, whoever comes late, and a lost rank ends all waits."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from tests.covering import later
from tests.unit.ranks.rank_process import GATHERED, JOBS, RESIDUAL, ROUNDS, SUMS, digest_of, partial, sum_in_order
from twostroke.base.errors import RankLost
from twostroke.kernels.cpu.build import Kernels
from twostroke.ranks.group import LEAST_SLOT_BYTES, MOST_SLOT_BYTES, RankGroup, create_memory

ROOT = Path(__file__).resolve().parents[3]
WAIT_S = 120.0
GROUPS = (1, 2, 3, 4)

Said = dict[int, list[dict[str, list[str]]]]
"""What each rank of a group of so many ranks said of each job."""


@pytest.fixture(scope="module")
def said(kernels: Kernels) -> Said:
    assert kernels.build, "it is built before the ranks load it"
    command = [sys.executable, "-m", "tests.unit.ranks.rank_process", *map(str, GROUPS)]
    process = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=WAIT_S, check=True)
    said: Said = {ranks: [{job.__name__: [] for job in JOBS} for _ in range(ranks)] for ranks in GROUPS}
    for line in process.stdout.splitlines():
        ranks, rank, job, what = line.split()
        said[int(ranks)][int(rank)][job].append(what)
    return said


def group_of_one(kernels: Kernels, most_bytes: int = 0) -> RankGroup:
    fd, slot_bytes = create_memory(kernels, 1, most_bytes)
    return RankGroup(kernels, fd, 0, 1, slot_bytes)


@pytest.mark.parametrize("ranks", later([1, 2, 3, 4], 1, 3))
def test_a_sum_has_the_bits_of_one_made_in_the_order_of_the_ranks_on_every_rank(said: Said, ranks: int) -> None:
    expected = [
        digest_of(sum_in_order([partial(seed, rank, count, dtype) for rank in range(ranks)]))
        for dtype in (torch.float32, torch.bfloat16)
        for seed, count in enumerate(SUMS)
    ]
    assert [rank["sums"] for rank in said[ranks]] == [expected] * ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_partials_made_in_the_shared_memory_are_summed_before_they_are_added(said: Said, ranks: int) -> None:
    expected = []
    for seed, count in enumerate(SUMS[:6]):
        partials = [partial(seed, rank, count, torch.float32) for rank in range(ranks)]
        expected.append(digest_of(partial(seed, RESIDUAL, count, torch.float32) + sum_in_order(partials)))
    assert [rank["partials"] for rank in said[ranks]] == [expected] * ranks


def test_the_order_of_the_ranks_shows_in_the_bits_of_these_numbers() -> None:
    partials = [partial(3, rank, 1000, torch.float32) for rank in range(3)]
    assert not torch.equal(sum_in_order(partials), sum_in_order(partials[::-1]))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_first_rank_gets_the_parts_of_all_ranks_side_by_side(said: Said, ranks: int) -> None:
    expected = []
    for seed, (rows, columns) in enumerate(GATHERED):
        parts = [partial(seed, rank, rows * columns[rank], torch.float32).view(rows, -1) for rank in range(ranks)]
        expected.append(digest_of(torch.cat(parts, 1)))
    assert [rank["gathers"] for rank in said[ranks]] == [expected] + [[]] * (ranks - 1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_thousands_of_rounds_with_ranks_that_come_late_end_in_the_same_sums(said: Said, ranks: int) -> None:
    kinds, total = random.Random(0), torch.zeros(64)
    for seed in range(ROUNDS):
        kinds.randrange(8)
        total[: kinds.randrange(1, 64)] += float(ranks * (seed % 100) + sum(range(ranks)))
    assert [rank["many"] for rank in said[ranks]] == [[digest_of(total)]] * ranks


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_an_abort_ends_the_waits_of_all_ranks(said: Said, ranks: int) -> None:
    *waiting, last = [rank["forever"] for rank in said[ranks]]
    assert waiting == [["RankLost"]] * (ranks - 1)
    assert last == [digest_of(torch.zeros(1))]


def test_another_thread_ends_a_wait_and_later_calls_do_not_wait(kernels: Kernels) -> None:
    fd, slot_bytes = create_memory(kernels, 2, 0)
    group = RankGroup(kernels, fd, 0, 2, slot_bytes)
    timer = threading.Timer(0.05, group.abort)
    timer.start()
    values = torch.ones(8)
    for _ in range(2):
        with pytest.raises(RankLost):
            group.all_reduce(values)
        with pytest.raises(RankLost):
            group.gather(values.view(2, 4), 8)
        with pytest.raises(RankLost):
            group.meet()
    timer.join()
    group.close()


def test_ranks_that_bring_different_sizes_find_out_at_once(kernels: Kernels) -> None:
    fd, slot_bytes = create_memory(kernels, 2, 0)
    first = RankGroup(kernels, os.dup(fd), 0, 2, slot_bytes)
    second = RankGroup(kernels, fd, 1, 2, slot_bytes)
    errors: list[BaseException] = []

    def reduce(group: RankGroup, count: int) -> None:
        try:
            group.all_reduce(torch.ones(count))
        except (AssertionError, RankLost) as error:
            errors.append(error)

    threads = [threading.Thread(target=reduce, args=each) for each in ((first, 8), (second, 9))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(errors) == 2
    assert any(isinstance(error, AssertionError) for error in errors)
    first.close()
    second.close()


def test_one_rank_waits_for_nobody_and_its_numbers_stay(kernels: Kernels) -> None:
    group = group_of_one(kernels)
    values = partial(1, 0, 100, torch.float32)
    before = values.clone()
    group.all_reduce(values)
    group.meet()
    whole = group.gather(values.view(10, 10), 10)
    assert whole is not None
    assert torch.equal(values, before)
    assert torch.equal(whole.flatten(), before)
    group.close()


def test_what_a_group_takes_is_given_back(kernels: Kernels) -> None:
    before = len(os.listdir("/proc/self/fd"))
    group = group_of_one(kernels, 10 * LEAST_SLOT_BYTES)
    assert len(os.listdir("/proc/self/fd")) > before
    group.close()
    group.close()
    assert len(os.listdir("/proc/self/fd")) == before
    group.abort()


def test_the_shared_memory_is_bounded_however_long_sums_are(kernels: Kernels) -> None:
    group = group_of_one(kernels, 1 << 40)
    assert group.slot_bytes == MOST_SLOT_BYTES
    values = torch.ones(MOST_SLOT_BYTES // 4 + 1)
    group.all_reduce(values)
    assert values.sum() == len(values)
    group.close()


def test_beats_are_counted_by_rank(kernels: Kernels) -> None:
    group = group_of_one(kernels)
    group.beat()
    group.beat()
    assert group.beats(0) == 2
    group.close()
