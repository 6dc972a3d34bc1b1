"""What a step is predicted to cost, and how many prompt tokens fit into one beside running streams. Pure values."""

from __future__ import annotations

import math
from dataclasses import dataclass

MIN_PROMPT_TOKENS = 16
"""Run beside streams whatever it costs, so that no prompt starves; on CPUs hardly dearer than one token."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step are a sum of these; 0 while unknown."""

    step_s: float = 0.0
    """Of any step that samples."""
    stream_s: float = 0.0
    """For each sequence that runs one token and samples the next."""
    context_token_s: float = 0.0
    """For each token that those sequences attend to."""
    prompt_token_s: float = 0.0
    prompt_step_s: float = 0.0
    """Of any step that computes prompt tokens."""
    prompt_pair_s: float = 0.0
    """For each pair of a prompt token and a token that it attends to."""

    def of_streams(self, streams: int, context_tokens: int) -> float:
        """A step in which every sequence runs one token and samples."""
        if not streams:
            return 0.0
        return max(0.0, self.step_s + streams * self.stream_s + context_tokens * self.context_token_s)

    def of_prompt(self, tokens: int, context_tokens: int, step_tokens: int) -> float:
        """`tokens` more of a prompt of which `context_tokens` are computed, in steps of at most `step_tokens`."""
        if tokens <= 0:
            return 0.0
        steps = -(-tokens // step_tokens) if step_tokens else 1
        pairs = tokens * (context_tokens + tokens / 2)
        return max(0.0, steps * self.prompt_step_s + tokens * self.prompt_token_s + pairs * self.prompt_pair_s)


@dataclass(frozen=True, slots=True)
class Budget:
    """How long a step may take in which streams run."""

    target_s: float
    cost: StepCost
    most_prompt_tokens: int
    """Predictions are trusted up to here: not far beyond what has been seen."""

    def prompt_tokens(self, streams: int, context_tokens: int) -> int:
        """Prompt tokens beside that many streams, which attend to `context_tokens` in all."""
        left_s = self.target_s - self.cost.of_streams(streams, context_tokens)
        fitting = left_s / self.cost.prompt_token_s if self.cost.prompt_token_s > 0 else math.inf
        return max(MIN_PROMPT_TOKENS, int(min(fitting, self.most_prompt_tokens)))

    def seconds_per_prompt_token(self, streams: int, context_tokens: int) -> float:
        """What a prompt waits per token that is computed beside those streams; 0 while unknown."""
        if not streams:
            return self.cost.prompt_token_s
        tokens = self.prompt_tokens(streams, context_tokens)
        return self.cost.of_streams(streams, context_tokens) / tokens + self.cost.prompt_token_s
