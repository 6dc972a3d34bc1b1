"""Predicted costs of steps, and how many prompt tokens fit into one beside running streams. Pure values."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np

from twostroke.scheduler.batch import Batch

MIN_PROMPT_TOKENS = 16
"""Fewest prompt tokens of a step beside streams, so that no prompt starves. They are cheap even on CPUs."""


SCORED_WEIGHT = 2
"""A prompt token with logprobs counts as this many prompt tokens: the head of a model costs less than its layers."""


@dataclass(frozen=True, slots=True)
class StepTerms:
    """The quantities that a step's cost depends on. The last token of a sequence that samples counts as a stream's."""

    streams: int = 0
    """Number of tokens after which one is drawn: the last one of each stream, and proposed ones."""
    context_tokens: int = 0
    """Tokens that the streams attend to, those of each stream once."""
    prompt_tokens: int = 0
    """Number of prompt tokens. Those whose logprobs are wanted count `SCORED_WEIGHT` times."""
    prompt_pairs: float = 0.0
    """Pairs of a prompt token and a token that it attends to."""

    @classmethod
    def of(cls, batch: Batch) -> StepTerms:
        streams = len(batch.samples)
        prompt_tokens = len(batch.tokens) - streams
        if not prompt_tokens and streams == batch.sequences:
            return cls(streams, int(batch.context_lens.sum()))
        if not streams and not batch.scores:
            return cls(prompt_tokens=prompt_tokens, prompt_pairs=_pairs_of(batch))
        ends, drawn = batch.context_lens.astype(np.int64), np.zeros(batch.sequences, np.int64)
        for sample in batch.samples:
            drawn[sample.row] += 1
        proposed = np.maximum(drawn - 1, 0)
        context_tokens = int((ends - proposed)[drawn > 0].sum())
        if not prompt_tokens:
            return cls(streams, context_tokens)
        lengths = np.diff(batch.query_starts).astype(np.int64) - drawn
        ends -= drawn
        pairs = float((lengths * (2 * ends - lengths)).sum()) / 2
        if batch.scores:
            prompt_tokens += (SCORED_WEIGHT - 1) * batch.scored_tokens
        return cls(streams, context_tokens, prompt_tokens, pairs)


def _pairs_of(batch: Batch) -> float:
    """Returns the pairs of a token and one that it attends to, of a step that samples nothing. It has few sequences."""
    starts: list[int] = batch.query_starts.tolist()
    ends: list[int] = batch.context_lens.tolist()
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    return sum([length * (2 * end - length) for length, end in zip(lengths, ends, strict=True)]) / 2


@dataclass(frozen=True, slots=True)
class StreamStep:
    """What a step does for each of its streams, on average: more than one token where tokens are proposed."""

    rows: float = 1.0
    """Tokens that run per stream: its last one, and proposed ones."""
    tokens: float = 1.0
    """Tokens that become known per stream."""
    before_s: float = 0.0
    """Seconds of work before the step, for all streams."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Coefficients of the length of a step in seconds. They are 0 while unknown.

    There are three for prompts: constant, per token and per attended pair, as Mooncake (FAST '25) fits its prefill
    time. There are three for streams: constant, per sequence and per attended token, as Vidur (MLSys '24) splits
    decode.
    """

    step_s: float = 0.0
    """Seconds of any step that samples."""
    stream_s: float = 0.0
    """Seconds for each sequence that runs one token and samples the next."""
    context_token_s: float = 0.0
    """Seconds for each token that those sequences attend to."""
    prompt_token_s: float = 0.0
    prompt_step_s: float = 0.0
    """Seconds of any step that computes prompt tokens."""
    prompt_pair_s: float = 0.0
    """Seconds for each pair of a prompt token and a token that it attends to."""

    def of_streams(self, streams: int, context_tokens: int) -> float:
        """Returns the length of a step in which every sequence runs one token and samples."""
        if not streams:
            return 0.0
        return max(0.0, self.step_s + streams * self.stream_s + context_tokens * self.context_token_s)

    def of_prompt(self, tokens: int, context_tokens: int, step_tokens: int) -> float:
        """Returns the time for `tokens` more of a prompt after `context_tokens`, in steps of at most `step_tokens`."""
        if tokens <= 0:
            return 0.0
        steps = -(-tokens // step_tokens) if step_tokens else 1
        return self.of_prompts(steps, tokens, tokens * (context_tokens + tokens / 2))

    def of_prompts(self, steps: int, tokens: int, pairs: float) -> float:
        return max(0.0, steps * self.prompt_step_s + tokens * self.prompt_token_s + pairs * self.prompt_pair_s)

    def of(self, terms: StepTerms) -> float:
        """Returns the length of one step."""
        streams_s = self.of_streams(terms.streams, terms.context_tokens)
        return streams_s + self.of_prompts(terms.prompt_tokens > 0, terms.prompt_tokens, terms.prompt_pairs)

    def with_streams(self, each: StreamStep) -> StepCost:
        """Returns the costs of steps that do this for each of their streams."""
        return StepCost(
            self.step_s + each.before_s,
            each.rows * self.stream_s,
            self.context_token_s,
            self.prompt_token_s,
            self.prompt_step_s,
            self.prompt_pair_s,
        )

    def per_token(self, tokens: float) -> StepCost:
        """Returns the costs of streams per token, if a step makes `tokens` of each stream known."""
        step_s, stream_s, context_token_s = self.step_s, self.stream_s, self.context_token_s
        return replace(
            self, step_s=step_s / tokens, stream_s=stream_s / tokens, context_token_s=context_token_s / tokens
        )

    def prompt_fraction(self, terms: StepTerms) -> float:
        """Returns the fraction of a step's time that its prompt tokens take."""
        if not terms.prompt_tokens:
            return 0.0
        streams_s = self.of_streams(terms.streams, terms.context_tokens)
        return 1 - streams_s / self.of(terms) if streams_s else 1.0


@dataclass(frozen=True, slots=True)
class Queued:
    """Prompt tokens that wait to be computed, and the streams that run beside them."""

    tokens: int = 0
    """Prompt tokens that are known, not computed, and not being computed or pulled elsewhere."""
    pairs: float = 0.0
    """Pairs of each of them and a token that it attends to."""
    streams: int = 0
    context_tokens: int = 0
    """Tokens that the streams attend to."""
    stream_tokens: int = 0
    """Tokens of streams that are known but not computed, mostly one each."""

    @property
    def all_tokens(self) -> int:
        return self.tokens + self.stream_tokens


LEAST_WEIGHT = 8.0
"""Least weight of waiting prompts: a second that they wait counts as much as a second's delay of this many streams."""
WEIGHT_OF_WAITING = 4.0
"""Weight of waiting prompts per second that they will wait in sum, if the product exceeds LEAST_WEIGHT."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The target length of a step in which streams run."""

    target_s: float
    cost: StepCost
    most_prompt_tokens: int
    """Most prompt tokens for which predictions are trusted."""
    waiting_s: float | None = None
    """Sum of the seconds that prompts here will wait. A step is shorter than the target where the full length would
    help these prompts less than it harms the streams. None: steps have the target length."""

    def step_s(self, streams: int, context_tokens: int) -> float:
        """Returns the best length of a step.

        A step of x times the streams' own length harms each stream by (x - 1)^2 / 2, because a small delay is hardly
        noticed. It helps the prompts by weight * (x - 1). The best x is where harm and help grow equally fast.
        """
        own_s = self.cost.of_streams(streams, context_tokens)
        if self.waiting_s is None or not own_s:
            return self.target_s
        weight = max(LEAST_WEIGHT, WEIGHT_OF_WAITING * self.waiting_s)
        return min(self.target_s, own_s * (1 + weight / streams))

    def prompt_tokens(self, streams: int, context_tokens: int, prompt_context_tokens: int = 0) -> int:
        """Returns how many prompt tokens fit beside the streams, which attend to `context_tokens` in all.

        The prompt tokens attend to `prompt_context_tokens` before them.
        """
        cost = self.cost
        own_s = cost.of_streams(streams, context_tokens)
        left_s = self.step_s(streams, context_tokens) - own_s - cost.prompt_step_s
        token_s = cost.prompt_token_s + prompt_context_tokens * cost.prompt_pair_s
        fitting = _most(max(0.0, left_s), token_s, cost.prompt_pair_s / 2)
        return max(MIN_PROMPT_TOKENS, int(min(fitting, self.most_prompt_tokens)))

    def drain_s(self, queued: Queued, step_tokens: int) -> float:
        """Returns the time until all queued tokens are computed, in steps of at most `step_tokens`."""
        if not queued.tokens:
            return 0.0
        chunk_tokens = step_tokens
        if queued.streams:
            attended = int(queued.pairs / queued.tokens)
            beside = self.prompt_tokens(queued.streams, queued.context_tokens, attended)
            chunk_tokens = max(1, min(step_tokens - queued.streams, beside))
        steps = -(-queued.tokens // chunk_tokens)
        streams_s = self.cost.of_streams(queued.streams, queued.context_tokens)
        return steps * streams_s + self.cost.of_prompts(steps, queued.tokens, queued.pairs)


def _most(limit: float, linear: float, quadratic: float) -> float:
    """Returns the greatest x >= 0 with linear * x + quadratic * x^2 <= limit."""
    if quadratic <= 0:
        return limit / linear if linear > 0 else math.inf
    return (math.sqrt(linear**2 + 4 * quadratic * limit) - linear) / (2 * quadratic)
