"""Costs of steps, fitted online, so that the next step can be predicted.

    seconds = step + streams * stream + context tokens * context_token
            + prompt_step + prompt tokens * prompt_token + prompt pairs * prompt_pair

The six are estimated together, by a Kalman filter with a drifting state (Kalman 1960). On a busy worker nearly every
step has streams and chunks of prompts, so each is seldom seen separately. Where all steps are alike, their length
cannot be divided over the terms. The filter knows that, and its predictions for such steps are right all the same.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from twostroke.scheduler.cost import MIN_PROMPT_TOKENS, Budget, StepCost, StepTerms

SCALES = np.array((1.0, 16.0, 16384.0, 1.0, 256.0, 131072.0))
"""Sizes of the six terms in a usual step: they bring the factors to one order of magnitude."""
UNKNOWN = np.array((10.0, 10.0, 10.0, 1.0, 10.0, 3.0))
"""Prior error of each factor, in lengths of the first step that has its term. The time of a prompt depends mostly on
its tokens."""
OF_STREAMS, OF_PROMPTS = slice(0, 3), slice(3, 6)
NOISE = 0.15
"""Share of a step's time that says nothing about the next one."""
DRIFT = 0.04
"""Share by which all costs of a step may change together until the next step. So the last few dozen steps count."""
APART = 0.01
"""Share by which each cost alone may change until the next step."""
LEAST = 0.05
"""Share of a step's length; a smaller cost drifts as if it were that large."""
OUTLIER = 3.0
"""A step counts for at most this many times its prediction. More is due to other programs on the machine."""
TRUSTED_STEPS = 8
"""Number of steps of a kind before any step counts as an outlier."""
REACH = 2
"""Steps are predicted for up to this many times the prompt tokens of any that was seen."""

Floats = npt.NDArray[np.float64]


class Rates:
    """Costs of recent steps; 0 while unknown."""

    def __init__(self) -> None:
        self._factors: Floats = np.zeros(6)
        self._covariance: Floats = np.zeros((6, 6))
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
        self.cost = StepCost(**dict(zip(_COSTS, (self._nonnegative() / SCALES).tolist(), strict=True)))

    def _fit(self, x: Floats, seconds: float, is_first_of: tuple[bool | int, bool | int]) -> None:
        factors, covariance = self._factors, self._covariance
        for group, is_first in zip((OF_STREAMS, OF_PROMPTS), is_first_of, strict=True):
            if is_first:
                covariance[group, group] = np.diag((UNKNOWN[group] * seconds) ** 2)
        predicted_s = float(x @ factors)
        if self._is_trusted(x) and predicted_s > 0:
            seconds = min(seconds, OUTLIER * predicted_s)
        self._drift(x > 0, seconds)
        spread = covariance @ x
        gain = spread / (float(spread @ x) + (NOISE * seconds) ** 2 + 1e-18)
        factors += gain * (seconds - predicted_s)
        covariance -= np.outer(gain, spread)

    def _is_trusted(self, x: Floats) -> bool:
        steps = (
            self._stream_steps if x[OF_STREAMS].any() else None,
            self._prompt_steps if x[OF_PROMPTS].any() else None,
        )
        return all(count is None or count >= TRUSTED_STEPS for count in steps)

    def _drift(self, is_paid: npt.NDArray[np.bool_], seconds: float) -> None:
        """Lets the costs of the terms of this step drift, mostly together: a machine becomes slower or faster.

        Costs of other terms must not become uncertain, and neither must the division of steps that are all alike.
        Otherwise the next short tail would decide it.
        """
        sizes = np.where(is_paid, np.maximum(np.abs(self._factors), LEAST * seconds), 0.0)
        together = DRIFT * np.where(is_paid, self._factors, 0.0)
        self._covariance += np.outer(together, together)
        is_open = np.diag(self._covariance) < sizes**2
        self._covariance[np.diag_indices(6)] += np.where(is_open, (APART * sizes) ** 2, 0.0)

    def _nonnegative(self) -> Floats:
        """Returns the factors, negative ones set to 0 and the others adjusted (projection; Simon & Chia 2002)."""
        factors, covariance = self._factors, self._covariance
        for _ in range(6):
            worst = int(np.argmin(factors))
            if factors[worst] >= 0 or covariance[worst, worst] <= 0:
                break
            column = covariance[:, worst] / covariance[worst, worst]
            factors = factors - column * factors[worst]
            covariance = covariance - np.outer(column, covariance[worst])
            factors[worst] = 0.0
        return np.maximum(factors, 0.0)


_COSTS = ("step_s", "stream_s", "context_token_s", "prompt_step_s", "prompt_token_s", "prompt_pair_s")


def _scaled(terms: StepTerms) -> Floats:
    has_streams, has_prompt = terms.streams > 0, terms.prompt_tokens > 0
    values = (
        has_streams, terms.streams, terms.context_tokens if has_streams else 0,
        has_prompt, terms.prompt_tokens, terms.prompt_pairs if has_prompt else 0.0,
    )  # fmt: skip
    scaled: Floats = np.array(values, np.float64) / SCALES
    return scaled
