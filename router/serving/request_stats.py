"""What one answer was promised and what it got: reuse, time to the first token, gaps between tokens. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from router.metrics import Comparison
from router.routing.policy import Decision
from twostroke.ids import BlockName
from twostroke.lifetime import Instant, Lifetime
from twostroke.request_log import AnswerRecord, blocks_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Of an answer, what never changes."""

    request_id: str
    prompt_tokens: int
    names: Sequence[BlockName]
    """Of the prompt's full blocks."""
    block_size: int
    policy: str
    tenant: str
    priority: int


class Account:
    def __init__(self, asked: Asked, lifetime: Lifetime) -> None:
        self._asked = asked
        self._lifetime = lifetime
        self.attempts = 0
        self.cached_tokens = 0
        """As the first attempt to answer said: later ones find what earlier ones computed. Its last entry may know more
        than its first."""
        self.tokens = 0
        self._decision: Decision | None = None
        self._decided_at_s = 0.0
        self._first: Decision | None = None
        """The one that led to the first token."""
        self._first_attempt = 0
        self._actual_s: float | None = None
        self._first_token_s = 0.0
        self._latest_token_s = 0.0
        self._longest_gap_s = 0.0

    def placed(self, decision: Decision | None, decided_at_s: float) -> None:
        """What arrives from now on comes of this decision, or of another router's (None). Its time is by the clock that
        `arrived` is told."""
        self.attempts += 1
        self._decision, self._decided_at_s = decision, decided_at_s

    def arrived(self, tokens: int, cached_tokens: int, now_s: float) -> None:
        if tokens and not self.tokens:
            self._begin(now_s)
        elif tokens:
            self._longest_gap_s = max(self._longest_gap_s, now_s - self._latest_token_s)
        if tokens:
            self._latest_token_s = now_s
            self.tokens += tokens
        if self.attempts == self._first_attempt:
            self.cached_tokens = max(self.cached_tokens, cached_tokens)

    def _begin(self, now_s: float) -> None:
        self._lifetime.mark(Instant.FIRST_TOKEN)
        self._first, self._first_attempt = self._decision, self.attempts
        self._first_token_s = now_s
        if self.attempts == 1:
            self._actual_s = now_s - self._decided_at_s

    @property
    def comparison(self) -> Comparison | None:
        """None before the first token, and where another router had decided."""
        if self._first is None:
            return None
        forecast, size = self._first.forecast, self._asked.block_size
        # The prompt's, as the worker counts: after a failure, blocks of the answer are among those looked for, too.
        predicted = min(forecast.cached_blocks, len(self._asked.names))
        return Comparison(predicted, self.cached_tokens // size, forecast.first_token_s, self._actual_s)

    @property
    def token_s(self) -> float | None:
        """From one token to the next, on average; None before the second."""
        gaps = self.tokens - 1
        return (self._latest_token_s - self._first_token_s) / gaps if gaps > 0 else None

    def record(self, outcome: str) -> AnswerRecord:
        """For the request log, once the answer has ended."""
        asked, last, compared = self._asked, self._decision, self.comparison
        instants = self._lifetime.as_dict()
        return AnswerRecord(
            request_id=asked.request_id,
            arrival_s=instants[Instant.RECEIVED],
            outcome=outcome,
            prompt_tokens=asked.prompt_tokens,
            output_tokens=self.tokens,
            block_size=asked.block_size,
            blocks=blocks_of(asked.names),
            tenant=asked.tenant,
            priority=asked.priority,
            policy=asked.policy,
            attempts=self.attempts,
            decode=last.decode if last else None,
            source=last.source if last else None,
            peer=last.peer if last else None,
            peer_blocks=last.peer_blocks if last else 0,
            forecast=dataclasses.asdict(last.forecast) if last else {},
            price=dataclasses.asdict(last.why) if last and last.why else {},
            cached_tokens=self.cached_tokens,
            predicted_cached_tokens=compared.predicted_blocks * asked.block_size if compared else None,
            ttft_s=compared.actual_s if compared else None,
            predicted_ttft_s=compared.predicted_s if compared else None,
            itl_mean_s=self.token_s,
            itl_max_s=None if self.token_s is None else self._longest_gap_s,
            instants=instants,
        )
