"""Determinism: whether results depend on nothing but their sequence, and why. It is tried on the loaded model before it
serves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import numpy.typing as npt

from twostroke.base.errors import ConfigError
from twostroke.base.ids import PageId, RequestId, SessionId
from twostroke.kv_cache.layout import PoolLayout
from twostroke.kv_cache.memory import PageMemory
from twostroke.request import SamplingParams
from twostroke.scheduler.batch import Batch, GroupPlaces
from twostroke.scheduler.batching import BatchBuilder, Chunk
from twostroke.scheduler.sequence import Sequence

if TYPE_CHECKING:  # torch, which a fleet of paced workers does without
    import torch


@dataclass(frozen=True, slots=True)
class Determinism:
    """Whether the bits of an engine's tokens and pages are independent of other streams, of chunks and of threads."""

    holds: bool
    why: str


PACED: Final = Determinism(True, "tokens are hashes of page contents")
NATIVE: Final = Determinism(True, "native kernels sum each output in one order")
EXPANDED: Final = Determinism(False, "long chunks of latents are expanded, short ones absorbed; see --deterministic")
STEADY: Final = Determinism(True, "--deterministic: torch products in tiles of fixed sizes, tried at start")
TORCH: Final = Determinism(False, "torch picks its order of summation by the number of rows; see --deterministic")
DEVICE: Final = Determinism(False, "CUDA products pick their order of summation by the number of rows")


TRIED_TOKENS: Final = 53
"""Tokens of the prompt: some blocks and a tail. As a whole they are a large and a small tile; in chunks they are
others."""
CUTS: Final = (1, 8, 41)
"""Tokens after which the prompt is cut the second time: its chunks have one row, few or many."""
COMPANY: Final = (1, 0, 17, 3)
"""Rows of another prompt before each chunk, in the same step."""

DRAW: Final = SamplingParams(seed=0, max_tokens=1)


class TriedRunner(Protocol):
    def logits(self, batch: Batch) -> torch.Tensor | None: ...


def check_deterministic(
    runner: TriedRunner, memory: PageMemory, *, block_size: int, vocab: int, longest: int, with_head: bool
) -> None:
    """Computes a prompt twice: whole, and in chunks together with another one. No page may be in use yet.

    Raises ConfigError where its pages or its logits differ in a bit.
    """
    rows = min(region.pages for region in memory.layout.regions)
    count = min(TRIED_TOKENS, rows * block_size, longest)
    pages = list(map(PageId, range(-(-count // block_size))))
    known: list[int] = np.random.default_rng(0).integers(0, vocab, count).tolist()
    builder = BatchBuilder(block_size, memory.scratch, ())
    trial = _Trial(runner, builder, memory.layout, block_size, DRAW if with_head else None)
    prompt = trial.sequence(known, pages)
    neighbour = trial.sequence(known[::-1], [memory.scratch] * len(pages))

    whole = trial.last_logits([Chunk(prompt, 0, count, with_head)])
    written = [region[: len(pages)].copy() for region in memory.regions]
    for region in memory.regions:
        region[: len(pages)] = 0
    cuts = [0, *(cut for cut in CUTS if cut < count), count]
    for start, end, company in zip(cuts, cuts[1:], COMPANY, strict=False):
        beside = [Chunk(neighbour, 0, min(company, count), with_head)] if company else []
        again = trial.last_logits([*beside, Chunk(prompt, start, end, with_head)])
        prompt.computed = end
    is_same = (np.array_equal(found[: len(pages)], own) for found, own in zip(memory.regions, written, strict=True))
    if not (all(is_same) and np.array_equal(again, whole)):
        raise ConfigError(
            "--deterministic cannot be kept on this machine: a prompt has other bits in chunks beside another one "
            "than alone; use --dtype bfloat16 with a C++ compiler, or leave --deterministic away",
            field="deterministic",
        )


@dataclass(frozen=True, slots=True)
class _Trial:
    runner: TriedRunner
    builder: BatchBuilder
    layout: PoolLayout
    block_size: int
    sampling: SamplingParams | None

    def sequence(self, known: list[int], pages: list[PageId]) -> Sequence:
        return Sequence(RequestId("trial"), SessionId(0), known, len(known), [], sampling=self.sampling, pages=pages)

    def last_logits(self, chunks: list[Chunk]) -> npt.NDArray[np.float32]:
        """Returns the logits of the last chunk's last row; none if the model has no head."""
        logits = self.runner.logits(_in_all_groups(self.builder.build(chunks).batch, self.layout, self.block_size))
        return np.zeros(0, np.float32) if logits is None else logits[-1].float().numpy()


def _in_all_groups(batch: Batch, layout: PoolLayout, block_size: int) -> Batch:
    """Returns the step with places in the other page groups, too.

    Their pages have the same numbers as those of the first group. Scratch pages are each group's own.
    """

    def places(scratch: int) -> GroupPlaces:
        rows, offsets = np.divmod(batch.write_slots, block_size)
        tables = np.minimum(batch.block_tables, np.int32(scratch))
        return GroupPlaces(tables, np.minimum(rows, scratch) * block_size + offsets)

    return replace(batch, further=tuple(places(region.pages) for region in layout.regions[1:]))
