"""What a step takes, in Dynamo's replay and here: the same lengths, by one of its timing models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tools.simulate.fleet.shape import FleetShape
from tools.simulate.fleet.worker.steps import StepLengths
from twostroke.scheduler.cost import StepCost, StepTerms
from twostroke.scheduler.step_target import USUAL_S

PREFILL_S = 0.41
"""Length of a step with prompt tokens: about that of 4,096 of them at 10,000 in a second."""
DECODE_S = 0.018
PROMPT_MS = (1.650142e01, 1.518344e-02, 4.209989e-07)
"""Milliseconds of a step with T prompt tokens in Dynamo's polynomial model: factors of 1, T and T^2."""
STREAMS_MS = (5.74, 54.01, -25.74)
"""Milliseconds of a step whose streams attend to a share u of all pages: factors of 1, u and u^2."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One timing model, as Dynamo's replay is told of it and as a fleet here has it."""

    theirs: dict[str, Any]
    cost: StepCost
    """What workers here know of their steps, and tell routers."""
    step_target_s: float
    lengths: StepLengths | None = None
    """What steps take here, where `cost` is not exact."""


@dataclass(frozen=True, slots=True)
class PolynomialLengths:
    """The lengths of steps in Dynamo's polynomial model."""

    pool_tokens: int
    """Tokens that fit into a decode worker's pages."""

    def of(self, terms: StepTerms) -> float:
        return self._of_streams(terms) + self._of_prompts(terms)

    def prompt_fraction(self, terms: StepTerms) -> float:
        return self._of_prompts(terms) / self.of(terms)

    def _of_streams(self, terms: StepTerms) -> float:
        share = min(1.0, terms.context_tokens / self.pool_tokens)
        return 1e-3 * _value(STREAMS_MS, share) if terms.streams else 0.0

    def _of_prompts(self, terms: StepTerms) -> float:
        return 1e-3 * _value(PROMPT_MS, terms.prompt_tokens) if terms.prompt_tokens else 0.0


def fixed(shape: FleetShape) -> Timing:
    """Every step has the length of its kind, whatever runs in it."""
    theirs = {"type": "fixed", "prefill_ms": 1e3 * PREFILL_S, "decode_ms": 1e3 * DECODE_S}
    return Timing(theirs, StepCost(step_s=DECODE_S, prompt_step_s=PREFILL_S), DECODE_S + PREFILL_S)


def polynomial(shape: FleetShape) -> Timing:
    """The default of Dynamo's replay. Workers here know the straight lines through an empty and a full step of prompt
    tokens, and through an empty worker and one whose streams take half of all pages."""
    prompt_s = 1e-3 * (_value(PROMPT_MS, shape.step_tokens) - PROMPT_MS[0]) / shape.step_tokens
    half = shape.decode_pool_tokens / 2
    cost = StepCost(
        step_s=1e-3 * STREAMS_MS[0],
        context_token_s=1e-3 * (_value(STREAMS_MS, 0.5) - STREAMS_MS[0]) / half,
        prompt_step_s=1e-3 * PROMPT_MS[0],
        prompt_token_s=prompt_s,
    )
    return Timing({"type": "polynomial"}, cost, USUAL_S, PolynomialLengths(shape.decode_pool_tokens))


TIMINGS: dict[str, Callable[[FleetShape], Timing]] = {"fixed": fixed, "polynomial": polynomial}


def _value(factors: tuple[float, float, float], x: float) -> float:
    constant, linear, quadratic = factors
    return constant + linear * x + quadratic * x * x
