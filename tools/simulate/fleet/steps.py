"""What steps take on a simulated worker, and many equal ones at once.

Tokens are not computed: a step is its chunks, and its length is what the cost model says, times seeded noise.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence as ListOf
from dataclasses import dataclass

import numpy as np

from twostroke.request import SampledToken
from twostroke.scheduler.batch import Batch
from twostroke.scheduler.batching import Chunk, Step
from twostroke.scheduler.cost import StepCost, StepTerms

TOKEN = 0
"""Whatever is sampled: nobody looks at it."""
SAMPLED = SampledToken(TOKEN)
NOISY_STEPS = 16
"""Steps at once where each has a length of its own: few, as most of a long run is cut short."""

_NO_BATCH = Batch(
    tokens=np.zeros(0, np.int32),
    positions=np.zeros(0, np.int32),
    query_starts=np.zeros(1, np.int32),
    context_lens=np.zeros(0, np.int32),
    block_tables=np.zeros((0, 0), np.int32),
    write_slots=np.zeros(0, np.int64),
)


class ChunksOnly:
    """Builds steps that no model runs."""

    def build(self, chunks: ListOf[Chunk]) -> Step:
        return Step(tuple(chunks), _NO_BATCH)


def terms_of(chunks: ListOf[Chunk]) -> StepTerms:
    streams = context_tokens = prompt_tokens = 0
    pairs = 0.0
    for chunk in chunks:
        end = chunk.end
        if chunk.samples:
            streams += 1
            context_tokens += end
            end -= 1
        tokens = end - chunk.start
        prompt_tokens += tokens
        pairs += tokens * (chunk.start + tokens / 2)
    return StepTerms(streams, context_tokens, prompt_tokens, pairs)


class Pace:
    """A worker's: lengths of its steps."""

    def __init__(self, cost: StepCost, noise: float, seed: str) -> None:
        self.cost = cost
        self._noise = noise
        self._draws = random.Random(seed)

    def flight(self, step: Step, begun_s: float, repeats: int) -> Flight:
        """The step, and `repeats` more like it or somewhat fewer."""
        cost, terms = self.cost, terms_of(step.chunks)
        length_s = cost.of(terms)
        growth_s = terms.streams * cost.context_token_s
        noisy: tuple[float, ...] = ()
        if self._noise:
            repeats = min(repeats, NOISY_STEPS - 1)
            steps = ((length_s + n * growth_s) * self._factor() for n in range(repeats + 1))
            noisy = tuple(itertools.accumulate(steps))
        return Flight(step, terms, begun_s, length_s, growth_s, cost.prompt_share(terms), noisy, 1 + repeats)

    def _factor(self) -> float:
        """Draw a factor; its mean is 1."""
        return self._draws.lognormvariate(-(self._noise**2) / 2, self._noise)


@dataclass(slots=True)
class Flight:
    """Equal steps under way, each a little longer than the one before as its streams' contexts grow."""

    step: Step
    terms: StepTerms
    begun_s: float
    first_s: float
    growth_s: float
    prompt_share: float
    """Share of the step's length that prompt tokens take."""
    noisy: tuple[float, ...]
    """Seconds from the beginning to the end of each step, where there is noise."""
    steps: int

    def after(self, steps: int) -> float:
        """Seconds from the beginning until so many of them have ended."""
        if self.noisy:
            return self.noisy[steps - 1] if steps else 0.0
        return steps * self.first_s + self.growth_s * steps * (steps - 1) / 2

    @property
    def end_s(self) -> float:
        return self.begun_s + self.after(self.steps)

    def ended_by(self, now_s: float) -> int:
        """Steps that have ended by then."""
        low, high = 0, self.steps
        while low < high:
            middle = (low + high + 1) // 2
            if self.begun_s + self.after(middle) <= now_s:
                low = middle
            else:
                high = middle - 1
        return low

    def cut(self, now_s: float) -> bool:
        """End with the step that runs now; False where that is the last one anyway."""
        steps = min(self.steps, self.ended_by(now_s) + 1)
        is_cut = steps < self.steps
        self.steps = steps
        return is_cut
