"""Costs of steps, fitted online, so that the next step can be predicted.

    seconds = step + streams * stream + context tokens * context_token
            + prompt_step + prompt tokens * prompt_token + prompt pairs * prompt_pair

The six are estimated together, by a Kalman filter with a drifting state (Kalman 1960). On a busy worker nearly every
step has streams and chunks of prompts, so each is seldom seen separately. Where all steps are alike, their length
cannot be divided over the terms. The filter knows that, and its predictions for such steps are right all the same.
Six by six numbers after every step are plain lists: numpy takes five times as long for so few.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul

from twostroke.scheduler.cost import MIN_PROMPT_TOKENS, Budget, StepCost, StepTerms

SCALES = (1.0, 16.0, 16384.0, 1.0, 256.0, 131072.0)
"""Sizes of the six terms in a usual step: they bring the factors to one order of magnitude."""
UNKNOWN = (10.0, 10.0, 10.0, 1.0, 10.0, 3.0)
"""Prior error of each factor, in lengths of the first step that has its term. The time of a prompt depends mostly on
its tokens."""
OF_STREAMS, OF_PROMPTS = range(3), range(3, 6)
NOISE = 0.15
"""Standard deviation of a step's time around its cost, as a fraction of that time."""
DRIFT = 0.04
"""Fraction by which all costs of a step may change together until the next step. So the last few dozen steps count."""
APART = 0.01
"""Fraction by which each cost may change by itself until the next step."""
LEAST = 0.05
"""Share of a step's length below which a cost drifts as if it were that large."""
OUTLIER = 3.0
"""A step counts for at most this many times its prediction. More is due to other programs on the machine."""
TRUSTED_STEPS = 8
"""Number of steps of a kind before any step counts as an outlier."""
REACH = 2
"""Steps are predicted for up to this many times the prompt tokens of any that was seen."""


class Rates:
    """Costs of recent steps; 0 while unknown."""

    def __init__(self) -> None:
        self._factors = [0.0] * 6
        self._covariance = [[0.0] * 6 for _ in range(6)]
        """Covariance of the factors' errors; zeros for terms that no step has had."""
        self._stream_steps = 0
        self._prompt_steps = 0
        self._last_streams = StepTerms()
        self._last_prompt = StepTerms()
        self._most_prompt_tokens = MIN_PROMPT_TOKENS
        self.cost = StepCost()
        """The current estimate; no term is negative."""

    @property
    def seconds_per_step(self) -> float:
        """Length of a decode step with as many streams as the last one."""
        return self.cost.of_streams(self._last_streams.streams, self._last_streams.context_tokens)

    @property
    def seconds_per_token(self) -> float:
        """Prefill seconds per token, in chunks like the last one that was longer than a tail."""
        last = self._last_prompt
        return self.cost.of_prompts(last.prompt_tokens > 0, last.prompt_tokens, last.prompt_pairs) / max(
            1, last.prompt_tokens
        )

    def budget(self, target_s: float, waiting_s: float | None = None) -> Budget:
        return Budget(target_s, self.cost, REACH * self._most_prompt_tokens, waiting_s)

    def observe(self, terms: StepTerms, seconds: float) -> None:
        if terms.streams:
            self._last_streams = terms
        is_first_of = (terms.streams and not self._stream_steps, terms.prompt_tokens and not self._prompt_steps)
        if all(is_first_of):
            return  # the split between the two is unknown
        if terms.prompt_tokens:
            if terms.prompt_tokens >= min(MIN_PROMPT_TOKENS, self._last_prompt.prompt_tokens):
                self._last_prompt = terms
            self._most_prompt_tokens = max(self._most_prompt_tokens, terms.prompt_tokens)
        self._fit(_scaled(terms), seconds, is_first_of)
        self._stream_steps += terms.streams > 0
        self._prompt_steps += terms.prompt_tokens > 0
        step_s, stream_s, context_token_s, prompt_step_s, prompt_token_s, prompt_pair_s = [
            factor / scale for factor, scale in zip(self._nonnegative(), SCALES, strict=True)
        ]
        self.cost = StepCost(step_s, stream_s, context_token_s, prompt_token_s, prompt_step_s, prompt_pair_s)

    def _fit(self, x: Sequence[float], seconds: float, is_first_of: tuple[bool | int, bool | int]) -> None:
        for group, is_first in zip((OF_STREAMS, OF_PROMPTS), is_first_of, strict=True):
            if is_first:
                for term in group:
                    self._covariance[term][group.start : group.stop] = [0.0] * len(group)
                    self._covariance[term][term] = (UNKNOWN[term] * seconds) ** 2
        predicted_s = _product(x, self._factors)
        if self._is_trusted(x) and predicted_s > 0:
            seconds = min(seconds, OUTLIER * predicted_s)
        self._drift([term for term, size in enumerate(x) if size > 0], seconds)
        spread = [_product(row, x) for row in self._covariance]
        noise = _product(spread, x) + (NOISE * seconds) ** 2 + 1e-18
        gain = [each / noise for each in spread]
        self._factors = [
            factor + each * (seconds - predicted_s) for factor, each in zip(self._factors, gain, strict=True)
        ]
        self._covariance = _less_outer(self._covariance, gain, spread)

    def _is_trusted(self, x: Sequence[float]) -> bool:
        if x[OF_STREAMS.start] and self._stream_steps < TRUSTED_STEPS:
            return False
        return not x[OF_PROMPTS.start] or self._prompt_steps >= TRUSTED_STEPS

    def _drift(self, paid: Sequence[int], seconds: float) -> None:
        """Lets the costs of the terms of this step drift, mostly together: a machine becomes slower or faster.

        Costs of other terms must not become uncertain, and neither must the division of steps that are all alike.
        Otherwise the next short tail would decide it.
        """
        for term in paid:
            row, factor = self._covariance[term], self._factors[term]
            for other in paid:
                row[other] += DRIFT**2 * factor * self._factors[other]
            size = max(abs(factor), LEAST * seconds)
            if row[term] < size**2:
                row[term] += (APART * size) ** 2

    def _nonnegative(self) -> list[float]:
        """Returns the factors, negative ones set to 0 and the others adjusted (projection; Simon & Chia 2002)."""
        factors, covariance = self._factors, self._covariance
        for _ in range(6):
            least = min(factors)
            worst = factors.index(least)
            if least >= 0 or covariance[worst][worst] <= 0:
                break
            column = [row[worst] / covariance[worst][worst] for row in covariance]
            factors = [factor - each * least for factor, each in zip(factors, column, strict=True)]
            covariance = _less_outer(covariance, column, covariance[worst])
            factors[worst] = 0.0
        return [max(factor, 0.0) for factor in factors]


def _product(left: Sequence[float], right: Sequence[float]) -> float:
    return float(sum(map(mul, left, right)))


def _less_outer(matrix: list[list[float]], column: Sequence[float], row: Sequence[float]) -> list[list[float]]:
    """Returns the matrix less the outer product of two vectors."""
    return [
        [own - factor * each for own, each in zip(line, row, strict=True)] if factor else line
        for line, factor in zip(matrix, column, strict=True)
    ]


def _scaled(terms: StepTerms) -> list[float]:
    has_streams, has_prompt = terms.streams > 0, terms.prompt_tokens > 0
    values = (
        has_streams, terms.streams, terms.context_tokens if has_streams else 0,
        has_prompt, terms.prompt_tokens, terms.prompt_pairs if has_prompt else 0.0,
    )  # fmt: skip
    return [value / scale for value, scale in zip(values, SCALES, strict=True)]
