"""One epoch of one worker as the router knows it, and the facts that all decode workers have in common."""

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
"""The page form of a worker whose facts are not known yet."""
UTILISATION_AVERAGE_S = 60.0
"""Seconds over which utilisation is averaged. Bursts of some seconds are part of the queue instead."""


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
    """The supervisor lists the worker. Its facts or its first report are still missing."""
    SERVING = "serving"
    SUSPECT = "suspect"
    """The worker is silent, or its event stream broke: it gets no new work until it is heard again."""
    DEAD = "dead"
    """The worker was judged dead, or has reported that its engine is lost. Its requests continue elsewhere."""
    DRAINING = "draining"
    """The worker finishes its requests and takes no new ones."""
    REFUSED = "refused"
    """The worker's model, tokenizer or page form is not the fleet's."""
    OTHER_WEIGHTS = "other_weights"
    """New requests go to workers with other weights, as the fleet reloads. Its requests stay there."""


@dataclass(slots=True)
class Worker:
    """One epoch of one worker. Only the fleet changes it."""

    worker_id: WorkerId
    role: Role
    address: str
    epoch: Epoch
    state: WorkerState
    """State in the supervisor's view."""
    server: ServerInfo | None = None
    model: ModelInfo | None = None
    kv_form: KvForm = UNKNOWN_FORM
    """The form of its pages, from `model`."""
    load: Load = field(default_factory=Load)
    cost: StepCost = field(default_factory=StepCost)
    """Cost of its steps. The cost of a stream is that of all its rows in a step, proposed tokens included."""
    step_tokens_each: float = 1.0
    """Tokens that each stream gets in one of its steps, on average."""
    links: dict[WorkerId, LinkRate] = field(default_factory=dict)
    tier_page_s: tuple[float, ...] = (0.0,)
    """Seconds to load a page from each tier: device, host memory, disk, down to the worker's lowest tier."""
    reported_at_s: float | None = None
    """When the last event batch arrived, in seconds of this process's monotonic clock."""
    prefilled_at_s: float | None = None
    """When it last reported newly computed prompt tokens, which it measures costs by."""
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
        """Whether requests begun with its weights may be placed there, even if new requests go to other weights."""
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
        """Bytes of one of its pages. None: not known yet."""
        return None if self.model is None else self.model.page_bytes

    @property
    def conversion_page_s(self) -> float:
        return self.load.conversion_page_s

    @property
    def fingerprint(self) -> str:
        """Digest of its weights and page form. Empty: not known yet."""
        return "" if self.server is None else self.server.fingerprint

    @property
    def page_source(self) -> PageSource:
        """Its address and epoch, for workers that pull its pages."""
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
        if load.links != before.links:  # seldom, and there may be many
            self.links = {WorkerId(link.worker_id): LinkRate(link.latency_s, link.bytes_per_s) for link in load.links}

    def queue_s(self, now_s: float) -> float:
        """Returns the seconds that are left of the queue in its last report."""
        age_s = 0.0 if self.reported_at_s is None else now_s - self.reported_at_s
        return max(0.0, self.load.queued_s - age_s)

    @property
    def computes_until_s(self) -> float:
        """When the queue in its last report will be computed, in seconds; 0 without a queue."""
        return self.load.queued_s and (self.reported_at_s or 0.0) + self.load.queued_s

    @property
    def utilisation(self) -> float:
        """Share of about the last minute that it spent on prompt tokens."""
        return min(1.0, self._busy_share)

    def _note_busy(self, busy_s: float, elapsed_s: float) -> None:
        """Updates the exponential average. Steps are reported when they end, so `busy_s` may exceed `elapsed_s`."""
        passed = max(elapsed_s, 0.0) / UTILISATION_AVERAGE_S
        weight = -math.expm1(-passed) / passed if passed else 1.0
        self._busy_share = self._busy_share * math.exp(-passed) + weight * busy_s / UTILISATION_AVERAGE_S


def step_cost(load: Load) -> StepCost:
    """Returns the measured cost of a worker's steps; zeros before it has measured any."""
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
    """Returns the average rows and tokens that each stream has in a worker's step.

    They are one row and one token for a worker that reports none.
    """
    each = load.stream_step
    return StreamStep(each.rows or 1.0, each.tokens or 1.0, each.before_s)


def token_cost(load: Load) -> StepCost:
    """Returns the cost of a worker's steps, with a stream's cost divided by its tokens in a step."""
    each = stream_step(load)
    return step_cost(load).with_streams(each).per_token(each.tokens)


def _tier_page_s(load: Load) -> tuple[float, ...]:
    if not load.tiers:
        return (0.0,)
    reported = {tier_from_message(rate.tier): rate.page_s for rate in load.tiers}
    return tuple(reported.get(tier, 0.0) for tier in Tier if tier <= max(reported, default=Tier.DEVICE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of pages, which are the same in the whole fleet."""

    block_size: int
    page_bytes: int
    tail_blocks: int = 0
    """Last blocks of a prefix whose pages in the further group are needed to continue after it; 0: one group."""
    further_page_bytes: int = 0
    """Bytes of a page in the further group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingFacts(Shape):
    """Facts about the model that are the same at all decode workers, and the size of the smallest pool."""

    model: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    pool_tokens: int
    """Tokens that fit into the smallest pool of a decode worker."""
    pool_pages: int
    dtype: str
    kv_form: KvForm
    """The form of their pages."""
    fingerprint: str

    @property
    def context_tokens(self) -> int:
        """Most tokens of prompt and output of one choice: as many as model and pool can hold."""
        return min(self.max_model_len, self.pool_tokens)


SAME_FACTS = (*(each.name for each in fields(Shape)), "model", "max_model_len", "vocab_size", "dtype")
"""Facts that have the same names in `ModelInfo`."""
