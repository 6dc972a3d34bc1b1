"""One request's way through the simulated fleet, over as many routers and workers as it takes."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.admission.queued_request import Placement
from tools.simulate.fleet.results import RequestOutcome, Status
from tools.simulate.fleet.worker.steps import SAMPLED, TOKEN
from twostroke.base.ids import BlockHash, RequestId
from twostroke.request import Attempt, GenerateRequest, SamplingParams


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    index: int
    request_id: RequestId
    arrived_s: float
    prompt_tokens: int
    answer_tokens: int
    block_hashes: list[BlockHash]
    """Hashes of the full blocks of prompt and answer so far."""
    tenant: str = ""
    priority: int = 0
    placement: Placement | None = None
    attempts: int = 0
    emitted: int = 0
    first_token_s: float | None = None
    """When the decode worker had the first token, in seconds; `last_token_s` is measured there, too."""
    last_token_s: float | None = None
    longest_gap_s: float = 0.0
    cached_tokens: int = 0
    """Cached tokens of the first attempt that answered; `pulled_tokens` is of the same one."""
    pulled_tokens: int = 0
    peer_pages: int = 0
    """Pages that the computing worker got from a peer in this attempt."""
    has_begun: bool = False
    """Whether this attempt has its first token."""
    heard_attempt: int = 0
    """The latest attempt that brought its router a token."""
    was_lost: bool = False
    """Whether its worker was lost before it had its first token."""
    request: GenerateRequest = field(init=False)

    def __post_init__(self) -> None:
        sampling = SamplingParams(seed=0, max_tokens=self.answer_tokens, ignore_eos=True)
        self.request = GenerateRequest(prompt=(TOKEN,) * self.prompt_tokens, sampling=sampling)

    @property
    def known_tokens(self) -> int:
        return self.prompt_tokens + self.emitted

    def attempt(self, router_id: str) -> Attempt:
        """Returns the attempt as a router queues it, and as a decode worker is asked for it."""
        return Attempt(
            request=self.request,
            request_id=self.request_id,
            number=self.attempts,
            emitted=(SAMPLED,) * self.emitted,
            block_hashes=tuple(self.block_hashes),
            router_id=router_id,
        )

    def heard_first(self, cached_tokens: int, block_size: int) -> None:
        """Notes that the first token of an attempt has come."""
        if not self.heard_attempt:
            self.cached_tokens = cached_tokens
            self.pulled_tokens = min(self.peer_pages * block_size, cached_tokens)
        self.heard_attempt = self.attempts

    def forget_answer(self, block_size: int) -> None:
        """Drops what was answered: the client asks again, from the beginning."""
        del self.block_hashes[self.prompt_tokens // block_size :]
        self.placement = None
        self.emitted = 0
        self.first_token_s = self.last_token_s = None
        self.longest_gap_s = 0.0
        self.cached_tokens = self.pulled_tokens = 0
        self.heard_attempt = 0

    def outcome(
        self, status: Status, token_s: float, ended_s: float, retry_after_s: float | None = None
    ) -> RequestOutcome:
        """Returns the outcome. `token_s`: seconds from the decode worker to the client."""
        first_s, last_s, placement = self.first_token_s, self.last_token_s, self.placement
        decision = placement.decision if placement is not None else None
        gaps = self.emitted - 1
        mean_s = (last_s - first_s) / gaps if gaps > 0 and first_s is not None and last_s is not None else None
        return RequestOutcome(
            index=self.index,
            status=status,
            arrived_s=self.arrived_s,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.emitted,
            ttft_s=first_s + token_s - self.arrived_s if first_s is not None else None,
            finished_s=ended_s,
            itl_mean_s=mean_s,
            itl_max_s=self.longest_gap_s if mean_s is not None else None,
            cached_tokens=self.cached_tokens,
            pulled_tokens=self.pulled_tokens,
            predicted_ttft_s=decision.forecast.first_token_s if decision is not None and not self.was_lost else None,
            decided_s=placement.decided_at_s if placement is not None else None,
            decode=decision.decode if decision is not None else None,
            source=decision.source if decision is not None else None,
            peer=decision.peer if decision is not None else None,
            attempts=self.attempts,
            tenant=self.tenant,
            priority=self.priority,
            retry_after_s=retry_after_s,
        )
