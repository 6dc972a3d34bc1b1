"""What steps have cost so far, fitted online, so that the next one can be predicted.

    seconds = step + streams * stream + context tokens * context_token + prompt tokens * prompt_token

The four are estimated together (a Kalman filter whose state drifts): on a busy worker streams and chunks of prompts
share nearly every step, so none of them is ever seen alone.
"""

from __future__ import annotations

from twostroke.schedule.batch import Batch
from twostroke.schedule.cost import MIN_PROMPT_TOKENS, Budget, StepCost

SCALES = (1.0, 16.0, 16384.0, 256.0)
"""Of the four terms in a usual step: brings their factors to the same order of magnitude."""
NOISE = 0.15
"""Share of a step's time that says nothing about the next one."""
DRIFT = 0.04
"""Share by which a cost may change between steps that pay it: the last few dozen of them count."""
OUTLIER = 3.0
"""A step that took this many times its prediction met something else on the machine: it counts as that long at most."""
TRUSTED_STEPS = 8
"""Before that many, nothing is an outlier."""
REACH = 2
"""Steps are predicted for up to this many times the prompt tokens of any that was seen."""


class Rates:
    """Costs of recent steps; 0 while unknown."""

    def __init__(self) -> None:
        self._factors = [0.0] * 4
        self._covariance: list[list[float]] = []
        """Of the factors' errors; empty before the first step."""
        self._steps = 0
        self._streams = 0
        self._context_tokens = 0
        """Of the last step that ran streams."""
        self._most_prompt_tokens = MIN_PROMPT_TOKENS

    @property
    def cost(self) -> StepCost:
        step, stream, context, prompt = (factor / scale for factor, scale in zip(self._factors, SCALES, strict=True))
        return StepCost(step, stream, context, max(0.0, prompt))

    @property
    def seconds_per_step(self) -> float:
        """Of a step in which every sequence runs one token and samples the next, with as many as there were last."""
        return self.cost.of_streams(self._streams, self._context_tokens)

    @property
    def seconds_per_token(self) -> float:
        """Of prefill."""
        return self.cost.prompt_token_s

    def budget(self, target_s: float) -> Budget:
        return Budget(target_s, self.cost, REACH * self._most_prompt_tokens)

    def observe(self, batch: Batch, seconds: float) -> None:
        streams = len(batch.samples)
        prompt_tokens = len(batch.tokens) - streams
        if streams:
            self._streams = streams
            self._context_tokens = sum(int(batch.context_lens[sample.row]) for sample in batch.samples)
        if streams and prompt_tokens and not self._steps:
            return  # which of the two took how much is anybody's guess
        self._most_prompt_tokens = max(self._most_prompt_tokens, prompt_tokens)
        context_tokens = self._context_tokens if streams else 0
        terms = (float(streams > 0), float(streams), float(context_tokens), float(prompt_tokens))
        self._fit([term / scale for term, scale in zip(terms, SCALES, strict=True)], seconds)
        self._steps += 1

    def _fit(self, terms: list[float], seconds: float) -> None:
        predicted_s = sum(term * factor for term, factor in zip(terms, self._factors, strict=True))
        if self._steps >= TRUSTED_STEPS and predicted_s > 0:
            seconds = min(seconds, OUTLIER * predicted_s)
        if not self._covariance:
            self._covariance = [[(10 * seconds) ** 2 * (row == column) for column in range(4)] for row in range(4)]
        for index, (factor, term) in enumerate(zip(self._factors, terms, strict=True)):
            if term:  # what is not seen for long must not become anybody's guess: the next short tail would decide it
                self._covariance[index][index] += (DRIFT * max(abs(factor), 0.05 * seconds)) ** 2
        spread = [sum(c * term for c, term in zip(row, terms, strict=True)) for row in self._covariance]
        variance = sum(s * term for s, term in zip(spread, terms, strict=True)) + (NOISE * seconds) ** 2 + 1e-18
        for row in range(4):
            gain = spread[row] / variance
            self._factors[row] += gain * (seconds - predicted_s)
            for column in range(4):
                self._covariance[row][column] -= gain * spread[column]
