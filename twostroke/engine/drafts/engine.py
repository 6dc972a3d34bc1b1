"""The draft model of a decode worker: its runner, which uses the model's threads, and its private pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.engine.backends.memory_plan import MemoryUse
from twostroke.kv_cache.memory import PageMemory
from twostroke.scheduler.batch import Batch, Runner, StepResult
from twostroke.scheduler.constraints.draft_rows import DraftRow, first_batch, next_batch
from twostroke.scheduler.cost import StepTerms


@dataclass(frozen=True, slots=True)
class Drafted:
    """The result of one call of the draft model."""

    tokens: tuple[tuple[int, ...], ...]
    """Drafted tokens of each row; fewer than asked for where its logits were not finite."""
    steps: tuple[tuple[StepTerms, float], ...]
    """The terms of each step, and its seconds."""

    @property
    def seconds(self) -> float:
        return sum(seconds for _, seconds in self.steps)


@dataclass(frozen=True, slots=True)
class DraftEngine:
    """Only the engine thread calls `run` and `step`, between the steps of the model."""

    runner: Runner
    memory: PageMemory
    block_size: int
    max_model_len: int
    """Most tokens of a sequence in the draft model."""
    memory_use: tuple[MemoryUse, ...] = ()

    @property
    def pages(self) -> int:
        return self.memory.layout.regions[0].pages

    def step(self, batch: Batch) -> StepResult:
        return self.runner.run(batch)

    def run(self, rows: Sequence[DraftRow]) -> Drafted:
        """Computes the tokens that each row has not computed yet, and drafts its next ones.

        It takes one step for each further token of the longest draft.
        """
        drafted: list[list[int]] = [[] for _ in rows]
        steps: list[tuple[StepTerms, float]] = []
        batch, going, length = first_batch(rows, self.block_size), list(range(len(rows))), 1
        while True:
            result = self.runner.run(batch)
            steps.append((StepTerms.of(batch), result.seconds))
            for sample, token in zip(batch.samples, result.tokens, strict=True):
                if token.is_sound:
                    drafted[going[sample.row]].append(token.token)
            going = [row for row in going if len(drafted[row]) == length < rows[row].length]
            if not going:
                break
            batch = next_batch([rows[row] for row in going], [drafted[row] for row in going], self.block_size)
            length += 1
        return Drafted(tuple(map(tuple, drafted)), tuple(steps))

    def close(self) -> None:
        """Closes runner and memory, on the engine thread or once it has ended."""
        self.runner.close()
        self.memory.close()
