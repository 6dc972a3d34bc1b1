"""A scheduler on a bench: with a pool and the symbolic model, turned by hand."""

from __future__ import annotations

from tests.unit.scheduler.features import all_branches
from tests.unit.scheduler.symbolic import (
    ExactRunner,
    SymbolicMemory,
    SymbolicRunner,
    answering,
    limits,
    prefilling,
)
from twostroke.config import ScheduleConfig
from twostroke.kv_cache.pool import BlockPool
from twostroke.request import FinishReason, SamplingParams
from twostroke.scheduler.cost import Budget
from twostroke.scheduler.reading import ReadingRunner
from twostroke.scheduler.scheduler import Scheduler
from twostroke.scheduler.sequence import Sequence
from twostroke.scheduler.values import AdmittedSequence, Emission, SchedulerLimits

BLOCK = 4
FOREVER = SamplingParams(seed=0, max_tokens=1000, ignore_eos=True)


class Bench:
    """A scheduler with a pool and the symbolic model."""

    def __init__(
        self,
        pages: int = 64,
        *,
        of: SchedulerLimits | None = None,
        has_exact_blocks: bool = False,
        readings: ReadingRunner | None = None,
        **config: int,
    ) -> None:
        self.limits = of or limits(BLOCK)
        self.memory = SymbolicMemory(pages, self.limits.block_size)
        self.pool = BlockPool(pages, self.memory)
        runner = ExactRunner if has_exact_blocks else SymbolicRunner
        self.runner = runner(self.memory, self.pool)
        self.branches = all_branches(self.pool, self.limits, has_exact_blocks=has_exact_blocks, readings=readings)
        self.scheduler = Scheduler(self.pool, ScheduleConfig(**config), self.limits, branches=self.branches)
        self.numbers = 0

    def answer(self, prompt: list[int], params: SamplingParams = FOREVER) -> Sequence:
        sequence = self.sequence(prompt, params)
        self.scheduler.enqueue(sequence)
        return sequence

    def sequence(self, prompt: list[int], params: SamplingParams = FOREVER) -> Sequence:
        """Not enqueued yet."""
        self.numbers += 1
        return answering(self.numbers, prompt, params, self.limits.block_size)

    def prefill(self, tokens: list[int]) -> Sequence:
        self.numbers += 1
        sequence = prefilling(self.numbers, tokens, self.limits.block_size)
        self.scheduler.enqueue(sequence)
        return sequence

    def admit(self) -> list[AdmittedSequence]:
        admissions = self.scheduler.admit()
        self.pool.check_integrity()
        return admissions

    def admitted(self) -> list[Sequence]:
        return [admission.sequence for admission in self.admit()]

    def step(self) -> list[Emission]:
        """Plan, run, update; the pool is sound after each."""
        step = self.scheduler.plan()
        assert step is not None
        self.pool.check_integrity()
        emissions = self.scheduler.update(step, self.runner.run(step))
        self.pool.check_integrity()
        return emissions

    def planned(self, budget: Budget | None = None) -> list[tuple[Sequence, int, int]]:
        """The next step's chunks, which are run and settled too."""
        step = self.scheduler.plan(budget)
        assert step is not None
        self.scheduler.update(step, self.runner.run(step))
        self.pool.check_integrity()
        return [(chunk.sequence, chunk.start, chunk.end) for chunk in step.chunks]

    def finish(self, sequence: Sequence) -> tuple[list[int], FinishReason]:
        """Runs until `sequence` has ended."""
        for _ in range(10_000):
            self.admit()
            for emission in self.step():
                if emission.sequence is sequence and emission.finish is not None:
                    return sequence.known[sequence.prompt_tokens :], emission.finish
        raise AssertionError("it does not end")

    def finish_prefill(self, tokens: list[int]) -> None:
        """From now on their blocks are cached."""
        job = self.prefill(tokens)
        self.admit()
        while job.computed < len(tokens):
            self.step()
        self.scheduler.end(job)

    def is_clean(self) -> bool:
        self.pool.check_integrity()
        return self.pool.available == self.pool.total


def tokens(count: int, token: int = 1) -> list[int]:
    return [token] * count
