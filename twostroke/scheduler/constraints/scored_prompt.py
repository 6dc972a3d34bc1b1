"""A scored prompt: the logprobs of its tokens are wanted.

Cached and pulled pages bring no logits. So the sequence computes all of its prompt itself.
"""

from __future__ import annotations

from twostroke.request import PromptLogprobs
from twostroke.scheduler.batch import FeatureRows, ScoreRow
from twostroke.scheduler.cost import SCORED_WEIGHT
from twostroke.scheduler.sequence import Constraint, Demand, Sequence


class ScoredPrompt(Constraint):
    def __init__(self) -> None:
        self.scores: list[PromptLogprobs] = []
        """Logprobs of the prompt so far, step by step."""

    def demand(self, sequence: Sequence, demand: Demand) -> Demand:
        """Returns a demand for logits. Its chunks may end anywhere: the blocks are not read before the prompt is done.

        What a step has room for may be less than a block.
        """
        if not sequence.computes_all:
            return demand
        return demand._replace(weight=SCORED_WEIGHT, logits=1, ends_on_blocks=False)

    def fill(self, rows: FeatureRows, row: int, sequence: Sequence, tokens: range, proposed: tuple[int, ...]) -> None:
        if sequence.computes_all:
            assert sequence.sampling is not None
            targets = sequence.known[tokens.start + 1 : min(tokens.stop + 1, sequence.prompt_tokens)]
            rows.scores.append(ScoreRow(row, tuple(targets), sequence.sampling.prompt_logprobs or 0))

    def scored(self, scores: PromptLogprobs) -> None:
        self.scores.append(scores)

    def ran(self, sequence: Sequence, start: int, end: int) -> None:
        sequence.computes_all &= end < sequence.prompt_tokens - 1

    def preempted(self, sequence: Sequence) -> None:
        if sequence.computes_all:
            self.scores.clear()
            sequence.block_hashes.clear()
