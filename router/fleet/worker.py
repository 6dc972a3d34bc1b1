"""One epoch of one worker as the router knows it, and what all decode workers say about the model that they serve."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field, fields

from twostroke.base.ids import Epoch, WorkerId
from twostroke.config import Role
from twostroke.kv_cache.form import KvForm
from twostroke.kv_cache.tier import Tier
from twostroke.rpc.events import tier_from_message
from twostroke.rpc.v1.control_pb2 import (
    WORKER_STATE_DEAD,
    WORKER_STATE_DRAINING,
    Load,
    ModelInfo,
    ServerInfo,
    WorkerState,
)
from twostroke.rpc.v1.worker_pb2 import PageSource
from twostroke.scheduler.cost import StepCost, StreamStep

UNKNOWN_FORM = KvForm("")
"""The form of a worker that has not introduced itself."""
UTILISATION_AVERAGE_S = 60.0
"""Time over which utilisation is averaged: bursts of seconds are queues, not utilisation."""


@dataclass(frozen=True, slots=True)
class LinkRate:
    """Measured rate of pages from one worker to another."""

    latency_s: float
    bytes_per_s: float


class Liveness(enum.StrEnum):
    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"


class WorkerStatus(enum.StrEnum):
    JOINING = "joining"
    """The supervisor lists it; it has not introduced itself yet."""
    SERVING = "serving"
    SUSPECT = "suspect"
    """The worker is silent, or its event stream broke: it gets no new work until it is heard again."""
    DEAD = "dead"
    """The worker's requests continue elsewhere. A worker that has lost its engine reports it itself."""
    DRAINING = "draining"
    """The worker finishes what it has."""
    REFUSED = "refused"
    """The worker's pages would not fit the fleet's."""
    OTHER_WEIGHTS = "other_weights"
    """New requests go to workers with other weights; its requests stay there. A fleet that reloads has such workers."""


@dataclass(slots=True)
class Worker:
    """One epoch of one worker. Only the fleet changes it."""

    worker_id: WorkerId
    role: Role
    address: str
    epoch: Epoch
    state: WorkerState
    """State that the supervisor reports."""
    server: ServerInfo | None = None
    model: ModelInfo | None = None
    kv_form: KvForm = UNKNOWN_FORM
    """The form of its pages, as `model` says it."""
    load: Load = field(default_factory=Load)
    cost: StepCost = field(default_factory=StepCost)
    """Cost of its steps. The costs of a stream are of all rows that it has in a step, proposed tokens included."""
    step_tokens_each: float = 1.0
    """Tokens of each stream that one of its steps makes known, on average."""
    links: dict[WorkerId, LinkRate] = field(default_factory=dict)
    tier_page_s: tuple[float, ...] = (0.0,)
    """Seconds to load a page from each tier: device, host memory, disk, down to the worker's lowest tier."""
    reported_at_s: float | None = None
    """When the last event batch came in, by this process's monotonic clock."""
    prefilled_at_s: float | None = None
    """When it last reported newly computed prompt tokens: its costs are as old as that."""
    _busy_share: float = field(default=0.0, init=False)
    liveness: Liveness = Liveness.SUSPECT
    refusal: str | None = None
    has_other_weights: bool = False

    @property
    def status(self) -> WorkerStatus:
        if self.refusal is not None:
            return WorkerStatus.REFUSED
        if self.model is None or self.reported_at_s is None:
            return WorkerStatus.JOINING
        if self.load.state == WORKER_STATE_DEAD:
            return WorkerStatus.DEAD
        if self.liveness is not Liveness.ALIVE:
            return WorkerStatus(self.liveness)
        if self.has_other_weights:
            return WorkerStatus.OTHER_WEIGHTS
        if self._was_told_to_drain:
            return WorkerStatus.DRAINING
        return WorkerStatus.SERVING

    @property
    def takes_begun(self) -> bool:
        """Whether requests that began with its weights may continue there. New requests may go elsewhere."""
        return self.status in (WorkerStatus.SERVING, WorkerStatus.OTHER_WEIGHTS) and not self._was_told_to_drain

    @property
    def is_draining(self) -> bool:
        """Whether it finishes its requests and takes no new ones, whatever weights it has."""
        return self.status in (WorkerStatus.DRAINING, WorkerStatus.OTHER_WEIGHTS) and self._was_told_to_drain

    @property
    def _was_told_to_drain(self) -> bool:
        return WORKER_STATE_DRAINING in (self.state, self.load.state)

    @property
    def page_bytes(self) -> int | None:
        """Bytes of one of its pages; None while it has not introduced itself."""
        return None if self.model is None else self.model.page_bytes

    @property
    def conversion_page_s(self) -> float:
        return self.load.conversion_page_s

    @property
    def fingerprint(self) -> str:
        """Digest of its weights and page form; empty while it has not introduced itself."""
        return "" if self.server is None else self.server.fingerprint

    @property
    def page_source(self) -> PageSource:
        """How others address it to pull its pages."""
        return PageSource(worker_id=self.worker_id, address=self.address, epoch=str(self.epoch))

    def report(self, load: Load, now_s: float) -> None:
        if self.reported_at_s is not None:
            busy_s = load.prefill_busy_s - self.load.prefill_busy_s
            if busy_s > 0:
                self.prefilled_at_s = now_s
            self._note_busy(busy_s, now_s - self.reported_at_s)
        before, self.load, self.reported_at_s = self.load, load, now_s
        each = stream_step(load)
        self.cost = step_cost(load).with_streams(each)
        self.step_tokens_each = each.tokens
        self.tier_page_s = _tier_page_s(load)
        if load.links != before.links:  # they seldom change, and there is one for every peer
            self.links = {WorkerId(link.worker_id): LinkRate(link.latency_s, link.bytes_per_s) for link in load.links}

    def queue_s(self, now_s: float) -> float:
        """Returns the seconds that are left of the queue that it last reported."""
        age_s = 0.0 if self.reported_at_s is None else now_s - self.reported_at_s
        return max(0.0, self.load.queued_s - age_s)

    @property
    def computes_until_s(self) -> float:
        """When the queue that it reported will be done; 0 where it reported none."""
        return self.load.queued_s and (self.reported_at_s or 0.0) + self.load.queued_s

    @property
    def utilisation(self) -> float:
        """Share of the last minute or so that it spent on prompt tokens."""
        return min(1.0, self._busy_share)

    def _note_busy(self, busy_s: float, elapsed_s: float) -> None:
        """Adds to an exponential average. A step is reported when it has ended, so only sums of reports are exact."""
        passed = max(elapsed_s, 0.0) / UTILISATION_AVERAGE_S
        weight = -math.expm1(-passed) / passed if passed else 1.0
        self._busy_share = self._busy_share * math.exp(-passed) + weight * busy_s / UTILISATION_AVERAGE_S


def step_cost(load: Load) -> StepCost:
    """Returns the cost of a worker's steps, as the worker has measured it; zeros before it has."""
    costs = load.costs
    return StepCost(
        step_s=costs.step_s,
        stream_s=costs.stream_s,
        context_token_s=costs.context_token_s,
        prompt_token_s=costs.prompt_token_s,
        prompt_step_s=costs.prompt_step_s,
        prompt_pair_s=costs.prompt_pair_s,
    )


def stream_step(load: Load) -> StreamStep:
    """Returns what a worker's steps do for each stream.

    A worker that reports nothing makes one token known per step.
    """
    each = load.stream_step
    return StreamStep(each.rows or 1.0, each.tokens or 1.0, each.before_s)


def token_cost(load: Load) -> StepCost:
    """Returns what a worker's steps cost, with the costs of a stream divided by the tokens that it gets in a step."""
    each = stream_step(load)
    return step_cost(load).with_streams(each).per_token(each.tokens)


def _tier_page_s(load: Load) -> tuple[float, ...]:
    if not load.tiers:
        return (0.0,)
    reported = {tier_from_message(rate.tier): rate.page_s for rate in load.tiers}
    return tuple(reported.get(tier, 0.0) for tier in Tier if tier <= max(reported, default=Tier.DEVICE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Size of the pages that the whole fleet shares."""

    block_size: int
    page_bytes: int
    tail_blocks: int = 0
    """Number of last blocks of a prefix whose pages in the further group are needed to continue; 0: one group."""
    further_page_bytes: int = 0
    """Bytes of a page in the further group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingFacts(Shape):
    """What the decode workers say about the model they serve; they all say the same."""

    model: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    pool_tokens: int
    """Tokens that fit into one decode worker's pool."""
    pool_pages: int
    dtype: str
    kv_form: KvForm
    """The form of their pages."""
    fingerprint: str

    @property
    def context_tokens(self) -> int:
        """Tokens that prompt and answer of one choice may have together: the model's, or what a whole pool fits."""
        return min(self.max_model_len, self.pool_tokens)


SAME_FACTS = (*(each.name for each in fields(Shape)), "model", "max_model_len", "vocab_size", "dtype")
"""Facts that stand in a `ModelInfo` under the same names."""
