"""Compares the prediction for a choice with its outcome: reused blocks, time to first token, gaps between tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from router.metrics import Comparison
from router.routing.policy import Decision
from router.serving.parent_request import ParentRequest
from twostroke.base.ids import BlockHash, RequestId, WorkerId
from twostroke.base.lifetime import Instant, Lifetime
from twostroke.observability.request_log import AnswerRecord, blocks_of


@dataclass(slots=True, kw_only=True)
class RequestStats:
    """Prediction, outcome and instants of one choice. It reads no clock but through `lifetime`."""

    request_id: RequestId
    parent: ParentRequest
    block_hashes: Sequence[BlockHash]
    """Hashes of the prompt's full blocks."""
    block_size: int
    policy: str
    lifetime: Lifetime = field(default_factory=Lifetime)
    attempts: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the first attempt with a token found cached. Later ones would also find what it computed."""
    tokens: int = 0
    proposals: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Drafted and accepted tokens by drafter, of the attempt that ended the answer."""
    _decision: Decision | None = None
    _decided_at_s: float = 0.0
    _first: Decision | None = None
    """The decision that led to the first token."""
    _first_attempt: int = 0
    _actual_s: float | None = None
    _first_token_s: float = 0.0
    _latest_token_s: float = 0.0
    _longest_gap_s: float = 0.0

    def __post_init__(self) -> None:
        self.lifetime.mark(Instant.RECEIVED)

    def placed(self, decision: Decision | None, decided_at_s: float) -> None:
        """Notes the decision of the attempt that brings the next tokens. None: another router made it.

        `decided_at_s` and the `now_s` of `arrived` are of one clock.
        """
        self.attempts += 1
        self._decision, self._decided_at_s = decision, decided_at_s

    def arrived(self, tokens: int, cached_tokens: int, now_s: float) -> None:
        if tokens:
            if not self.tokens:
                self._begin(now_s)
            elif now_s - self._latest_token_s > self._longest_gap_s:
                self._longest_gap_s = now_s - self._latest_token_s
            self._latest_token_s = now_s
            self.tokens += tokens
        # Later messages of that attempt may report more cached tokens than its first one.
        if cached_tokens > self.cached_tokens and self.attempts == self._first_attempt:
            self.cached_tokens = cached_tokens

    def _begin(self, now_s: float) -> None:
        self.lifetime.mark(Instant.FIRST_TOKEN)
        self._first, self._first_attempt = self._decision, self.attempts
        self._first_token_s = now_s
        if self.attempts == 1:
            self._actual_s = now_s - self._decided_at_s

    @property
    def worker_id(self) -> WorkerId | None:
        """The decode worker of the latest decision."""
        return None if self._decision is None else self._decision.decode

    @property
    def comparison(self) -> Comparison | None:
        """The prediction and the outcome. None before the first token, or if another router made the decision."""
        if self._first is None:
            return None
        forecast = self._first.forecast
        # Only the prompt's blocks count, as at the worker: a later attempt's forecast includes blocks of the output.
        predicted = min(forecast.cached_blocks, len(self.block_hashes))
        reused = self.cached_tokens // self.block_size
        return Comparison(predicted, reused, forecast.first_token_s, self._actual_s)

    @property
    def token_s(self) -> float | None:
        """Average seconds from one token to the next; None before the second token."""
        gaps = self.tokens - 1
        return (self._latest_token_s - self._first_token_s) / gaps if gaps > 0 else None

    def record(self, outcome: str) -> AnswerRecord:
        """Returns the record for the request log. Call it when the choice has ended."""
        last, compared = self._decision, self.comparison
        instants = self.lifetime.as_dict()
        return AnswerRecord(
            request_id=self.request_id,
            arrival_s=instants[Instant.RECEIVED],
            outcome=outcome,
            prompt_tokens=len(self.parent.request.prompt),
            output_tokens=self.tokens,
            block_size=self.block_size,
            blocks=blocks_of(self.block_hashes),
            tenant=self.parent.routing.tenant,
            priority=self.parent.routing.priority,
            policy=self.policy,
            attempts=self.attempts,
            decode=last.decode if last else None,
            source=last.source if last else None,
            peer=last.peer if last else None,
            peer_blocks=last.peer_blocks if last else 0,
            forecast=dataclasses.asdict(last.forecast) if last else {},
            price=dataclasses.asdict(last.why) if last and last.why else {},
            cached_tokens=self.cached_tokens,
            predicted_cached_tokens=compared.predicted_blocks * self.block_size if compared else None,
            ttft_s=compared.actual_s if compared else None,
            predicted_ttft_s=compared.predicted_s if compared else None,
            itl_mean_s=self.token_s,
            itl_max_s=None if self.token_s is None else self._longest_gap_s,
            drafted_tokens={drafter: drafted for drafter, (drafted, _) in self.proposals.items()},
            kept_tokens={drafter: kept for drafter, (_, kept) in self.proposals.items()},
            instants=instants,
        )
