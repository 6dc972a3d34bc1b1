"""A split run on one GPU: one process prefills, another reads its pages over CUDA IPC and decodes, token for token.

The same chunks of the same prompts are computed by the decoding process too, into other pages; both runs then decode
with the same steps. Without a GPU the pages lie in shared host memory instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np
import torch
from torch import multiprocessing

from tests.trials.gpu.measure import DEVICE, ON_GPU, free_bytes
from tests.trials.gpu.model import empty_pages, plan_for, runner_for
from tests.trials.gpu.report import Report, Row
from tests.trials.gpu.shapes import BLOCK, SMALL, TINY
from tests.unit.engine.batches import Stream, step
from twostroke.device.sharing import CudaSharing
from twostroke.engine.backends.cuda.plan import DevicePlan
from twostroke.engine.backends.cuda.runner import DeviceRunner

GPU_PROMPTS, GPU_ANSWER, GPU_CHUNK = (700, 513, 37, 1024), 64, 256
CPU_PROMPTS, CPU_ANSWER, CPU_CHUNK = (40, 17, 9), 6, 16
WAIT_S = 120.0
SEED = 4


class Load:
    """The prompts, and on which pages each side keeps them."""

    def __init__(self) -> None:
        self.lengths, self.answer, self.chunk = (
            (GPU_PROMPTS, GPU_ANSWER, GPU_CHUNK) if ON_GPU else (CPU_PROMPTS, CPU_ANSWER, CPU_CHUNK)
        )
        self.spec = SMALL if ON_GPU else TINY
        random = np.random.default_rng(SEED)
        self.prompts = [random.integers(0, self.spec.vocab_size, length).tolist() for length in self.lengths]
        self.blocks = -(-(max(self.lengths) + self.answer) // BLOCK)

    def plan(self) -> DevicePlan:
        dtype = "bfloat16" if ON_GPU else "float32"
        length = self.blocks * BLOCK
        return plan_for(self.spec, dtype, sequences=len(self.prompts), length=length, tokens=self.chunk)

    def streams(self, seed: int) -> list[Stream]:
        """On pages drawn by `seed`."""
        pages = np.random.default_rng(seed).permutation(self.blocks * len(self.prompts)).reshape(-1, self.blocks)
        return [Stream(list(prompt), own.tolist()) for prompt, own in zip(self.prompts, pages, strict=True)]

    @property
    def pages(self) -> int:
        return self.blocks * len(self.prompts)


def prefill(runner: DeviceRunner, streams: list[Stream], chunk: int) -> None:
    """All full blocks of every prompt, chunk by chunk."""
    for stream in streams:
        full = len(stream.tokens) // BLOCK * BLOCK
        while stream.computed < full:
            count = min(chunk, full - stream.computed)
            runner.run(step([(Stream(stream.tokens[: full + 1], stream.pages, stream.computed), count)], BLOCK))
            stream.computed += count


def decode(runner: DeviceRunner, streams: list[Stream], answer: int) -> list[list[int]]:
    """Each prompt's tail by itself, then one token per step for all."""
    for stream in streams:
        tail = len(stream.tokens) - stream.computed
        batch = step([(stream, tail)], BLOCK) if tail else step([(_again(stream), 1)], BLOCK)
        stream.computed += tail
        stream.tokens.append(runner.run(batch).tokens[0].token)
    for _ in range(answer - 1):
        sampled = runner.run(step([(stream, 1) for stream in streams], BLOCK)).tokens
        for stream, token in zip(streams, sampled, strict=True):
            stream.computed += 1
            stream.tokens.append(token.token)
    return [stream.tokens[-answer:] for stream in streams]


def _again(stream: Stream) -> Stream:
    """A prompt of full blocks: its last token once more."""
    return Stream(stream.tokens, stream.pages, stream.computed - 1)


def shared(pages: torch.Tensor) -> bytes | torch.Tensor:
    """What opens the pages in another process, once."""
    return CudaSharing().share(pages) if ON_GPU else pages.share_memory_()


def opened(sent: bytes | torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Another process's pages, as many as there are here."""
    if isinstance(sent, torch.Tensor):
        return sent
    return CudaSharing().open(sent, DEVICE)[: like.nbytes].view(like.shape)


def prefill_process(pipe: Connection) -> None:
    """Fills pages of its own, hands them out, and keeps them until told to end."""
    load = Load()
    plan = load.plan()
    with torch.inference_mode():
        pages = empty_pages(plan, load.pages)
        runner = runner_for(plan, pages, SEED)
        prefill(runner, load.streams(seed=1), load.chunk)
        pipe.send(shared(pages))
        pipe.recv()
        runner.close()


def split_run(report: Report) -> Iterator[Row]:
    load = Load()
    free_bytes()  # to the other process, what earlier sections have left behind
    here, there = multiprocessing.get_context("spawn").Pipe()
    child = multiprocessing.get_context("spawn").Process(target=prefill_process, args=(there,), daemon=True)
    child.start()
    there.close()
    try:
        plan = load.plan()
        pages = empty_pages(plan, load.pages)
        runner = runner_for(plan, pages, SEED)
        colocated = load.streams(seed=2)
        prefill(runner, colocated, load.chunk)
        computed = [_full_pages(pages, stream) for stream in colocated]
        expected = decode(runner, colocated, load.answer)
        if not here.poll(WAIT_S):
            raise TimeoutError(f"the prefill process sent no pages in {WAIT_S:.0f} s")
        remote = opened(here.recv(), pages)
        split = load.streams(seed=3)
        pages.fill_(0xFF)  # NaN wherever nothing is copied to
        for stream, source in zip(split, load.streams(seed=1), strict=True):
            full = len(stream.tokens) // BLOCK
            pages[stream.pages[:full]] = remote[source.pages[:full]]
            stream.computed = full * BLOCK
        if ON_GPU:
            torch.cuda.synchronize()
        same_pages = sum(
            torch.equal(_full_pages(pages, mine), right) for mine, right in zip(split, computed, strict=True)
        )
        answers = decode(runner, split, load.answer)
        del remote
        here.send("done")
        child.join(WAIT_S)
        runner.close()
    finally:
        child.kill()
        child.join()
    count = len(load.prompts)
    how = "CUDA IPC" if ON_GPU else "shared host memory"
    same = sum(a == b for a, b in zip(answers, expected, strict=True))
    yield Row(f"split run over {how}, equal streams", f"{same} of {count}", passed=same == count)
    yield Row("  prompts whose pages are equal bit by bit", f"{same_pages} of {count}")


def _full_pages(pages: torch.Tensor, stream: Stream) -> torch.Tensor:
    full = stream.computed // BLOCK
    return pages[stream.pages[:full]].clone()
