"""Ranks on devices: a sum and a gathered result are recorded and replayed, and two ranks draw what one does.

The first needs one GPU. The second needs two, and says so where there is one. Without a GPU both are rehearsed on the
CPU, over gloo.
"""

from __future__ import annotations

import os
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from torch import multiprocessing

from tests.trials.gpu.measure import DEVICE, ON_GPU, free_bytes
from tests.trials.gpu.model import empty_pages, plan_for
from tests.trials.gpu.report import Report, Row
from tests.trials.gpu.shapes import BLOCK, SMALL, TINY, RandomSource
from tests.unit.engine.batches import Stream, step
from tests.unit.engine.reference_attention import reference_kernels
from twostroke.engine.backends.cuda.accelerator import accelerator_for
from twostroke.engine.backends.cuda.plan import DeviceKernels, DevicePlan, make_device_runner
from twostroke.engine.backends.cuda.runner import DeviceRunner
from twostroke.models.decoders.collective import Alone, Collective
from twostroke.models.shares.share import share_of
from twostroke.ranks.collectives import DeviceSums, Meeting, leave_group

RANKS = 2
WAIT_S = 120.0
SPEC = SMALL if ON_GPU else TINY
LENGTHS, ANSWER = ((200, 33, 64), 40) if ON_GPU else ((20, 9), 6)
ROWS, COLUMNS = 7, 1000
SEED = 4

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


@dataclass(frozen=True)
class NamedSource:
    """Random weights that follow from their names: ranks take them in another order."""

    device: torch.device

    def take(self, name: str, *shape: int) -> torch.Tensor:
        cpu = torch.device("cpu")
        return RandomSource.seeded(zlib.crc32(name.encode()), self.device, torch.float32, cpu).take(name, *shape)

    def take_matrix(self, name: str, rows: int, inputs: int) -> torch.Tensor:
        return self.take(name, rows, inputs)


def check_ranks(report: Report) -> Iterator[Row]:
    yield _recorded()
    if ON_GPU and torch.cuda.device_count() < RANKS:
        report.not_run.append(f"{RANKS} ranks draw what one does: skipped, one GPU")
        return
    yield _shared_out()


def _recorded() -> Row:
    """A group of one rank: its sum is what it brings."""
    with tempfile.NamedTemporaryFile() as file:
        Meeting(file.fileno(), 0, 1).join(DEVICE)
        sums, x = DeviceSums(0, [COLUMNS]), torch.zeros(ROWS, COLUMNS, device=DEVICE)

        def launch() -> tuple[torch.Tensor, ...]:
            gathered = sums.gather(sums.all_reduce(x * 2))
            assert gathered is not None
            return (gathered + 1,)

        recording = accelerator_for(DEVICE).record(launch)
        right = 0
        for value in (3.0, -5.0):
            x.fill_(value)
            recording.replay()
            right += torch.equal(recording.outputs[0], torch.full_like(x, 2 * value + 1))
        leave_group()
    return Row("a sum over ranks, recorded and replayed", f"{right} of 2 right", passed=right == 2)


def _shared_out() -> Row:
    expected = _drawn(_runner(0, 1, Alone()))
    free_bytes()  # to the ranks
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "meeting")
        ranks = [context.Process(target=_rank, args=(rank, meeting, there), daemon=True) for rank in range(RANKS)]
        for rank in ranks:
            rank.start()
        there.close()
        try:
            if not here.poll(WAIT_S):
                raise TimeoutError(f"the ranks have drawn nothing in {WAIT_S:.0f} s")
            drawn = here.recv()
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
    same = sum(one == other for one, other in zip(drawn, expected, strict=True))
    return Row(f"{RANKS} ranks draw what one does", f"{same} of {len(expected)} tokens", passed=same == len(expected))


def _rank(rank: int, meeting: str, pipe: Connection) -> None:
    with torch.inference_mode():
        torch.set_num_threads(1)
        fd = os.open(meeting, os.O_RDWR | os.O_CREAT, 0o600)
        device = torch.device("cuda", rank) if ON_GPU else DEVICE
        Meeting(fd, rank, RANKS).join(device)
        share = share_of(SPEC, rank, RANKS).share
        assert share is not None
        widths = [len(replace(share, index=each).of(SPEC.vocab_size)) for each in range(RANKS)]
        drawn = _drawn(_runner(rank, RANKS, DeviceSums(rank, widths)))
        if rank == 0:
            pipe.send(drawn)
        time.sleep(WAIT_S)  # until this process is ended: the other rank may still read what it has brought


def _plan(rank: int, ranks: int) -> DevicePlan:
    whole = plan_for(SPEC, "float32", sequences=len(LENGTHS), length=512, tokens=max(LENGTHS))
    device = torch.device("cuda", rank) if ON_GPU else DEVICE
    return replace(whole, spec=share_of(SPEC, rank, ranks), device=device)


def _runner(rank: int, ranks: int, sums: Collective) -> DeviceRunner:
    plan = _plan(rank, ranks)
    pages = empty_pages(plan, 32 * len(LENGTHS))
    kernels_over = DeviceKernels.over if ON_GPU else reference_kernels
    return make_device_runner(
        plan, NamedSource(plan.device), [pages], accelerator_for(plan.device), kernels_over, lambda: sums
    )


def _drawn(runner: DeviceRunner) -> list[int]:
    """The likeliest tokens behind the prefixes of streams whose tokens are given: prompts, then recorded steps."""
    random = np.random.default_rng(SEED)
    streams = [
        Stream(random.integers(0, SPEC.vocab_size, length + ANSWER).tolist(), list(range(32 * row, 32 * row + 32)))
        for row, length in enumerate(LENGTHS)
    ]
    tokens: list[int] = []
    for stream, length in zip(streams, LENGTHS, strict=True):
        runner.run(step([(stream, length)], BLOCK))
        stream.computed = length
    for _ in range(ANSWER):
        known = [replace(stream, tokens=stream.tokens[: stream.computed + 1]) for stream in streams]
        tokens += [token.token for token in runner.run(step([(stream, 1) for stream in known], BLOCK)).tokens]
        for stream in streams:
            stream.computed += 1
    runner.close()
    return tokens
