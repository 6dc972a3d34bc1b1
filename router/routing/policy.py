"""The inputs and results of a routing decision: frozen values, which router and simulator share.

A policy has no clock, no socket and no log. What changes from call to call (the turn, the draw that breaks ties) is in
the snapshot. A policy may remember its own decisions, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from router.fleet.worker import UNKNOWN_FORM, LinkRate
from twostroke.base.ids import BlockHash, WorkerId
from twostroke.kv_cache.form import KvForm
from twostroke.scheduler.cost import StepCost

UNKNOWN = StepCost()
NO_LINKS: Mapping[WorkerId, LinkRate] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One worker for one decision: its own report plus what was placed there since."""

    worker: WorkerId
    queue_s: float = 0.0
    """Predicted seconds until it has computed all prompt tokens of earlier requests."""
    queued_tokens: int = 0
    """Tokens that are known but not computed yet."""
    requests: int = 0
    """Pulls or requests that it has or will get, in any stage."""
    running: int = 0
    """Sequences that hold pages."""
    waiting: int = 0
    """Requests or pulls that hold no pages yet."""
    slots: int = 0
    """Sequences that can hold pages at once; 0 while unknown."""
    slots_taken: float = 0.0
    """Slots that its requests need, with those placed there before this one. If some wait, more than `slots`."""
    pages_free: int = 0
    pages_cached: int = 0
    """Pages with blocks that no request uses now. They can be evicted."""
    pages_active: int = 0
    cost: StepCost = UNKNOWN
    """Cost of its steps, proposed tokens included; zeros while unknown."""
    step_tokens_each: float = 1.0
    """Tokens that each stream gets in one of its steps, on average."""
    step_tokens: int = 0
    """Most tokens in one step; 0 while unknown."""
    step_target_s: float = 0.0
    """Seconds that its steps should take at most while streams run; 0 while unknown."""
    depths: tuple[int, ...] = (0,)
    """Leading blocks of this request that it holds or is about to hold, in total for each tier: on the device; there or
    in host memory; there, in host memory or on disk."""
    resident: tuple[int, ...] = (0,)
    """Leading blocks that it already holds, in total down to each tier. Others can fetch these from it."""
    page_blocks: int | None = None
    """Leading blocks of this request with pages in its first page group, even if further pages are missing. None: one
    group."""
    tier_page_s: tuple[float, ...] = (0.0,)
    """Measured seconds to load one page to the device from each tier; 0 for the device."""
    kv_form: KvForm = UNKNOWN_FORM
    """The form of its pages."""
    page_bytes: int | None = None
    """Bytes of one of its pages. None: the snapshot's `page_bytes`."""
    conversion_page_s: float = 0.0
    """Measured seconds to convert one page there, between the forms of prefill and decode workers."""
    links: Mapping[WorkerId, LinkRate] = field(default_factory=lambda: NO_LINKS)
    """Rates of its pulls, by the worker it pulls from."""
    fetch_wait_s: float = 0.0
    """Seconds until it has pulled the pages of earlier requests, if it pulls without a pause."""
    serve_wait_s: float = 0.0
    """Seconds until others have pulled the pages that they need from it."""
    load_wait_s: float = 0.0
    """Seconds until it has loaded the blocks of earlier requests from lower tiers."""
    utilisation: float = 0.0
    """Share of the last minute that it spent on prompt tokens."""
    compile_s: float = 0.0
    """Predicted seconds until it has compiled the request's output constraint; 0 if it has it already."""

    @property
    def cached_blocks(self) -> int:
        """How many leading blocks it holds or is about to hold, on any tier."""
        return self.depths[-1]

    @property
    def resident_blocks(self) -> int:
        """How many leading blocks others can fetch from it, from any tier."""
        return self.resident[-1]

    def resident_down_to(self, tier: int) -> int:
        """Returns how many leading blocks others can fetch from it, from this tier and those above it."""
        return self.resident[min(tier, len(self.resident) - 1)]

    def loaded_in_s(self, blocks: int) -> float:
        """Returns predicted seconds until the first `blocks` are on the device. They wait for earlier loads."""
        load_s = self.load_s(blocks)
        return self.load_wait_s + load_s if load_s else 0.0

    def load_s(self, blocks: int) -> float:
        """Returns the seconds to load those of the first `blocks` that it has only on lower tiers."""
        if len(self.depths) == 1 or blocks <= self.depths[0]:
            return 0.0
        seconds, known = 0.0, 0
        for depth, page_s in zip(self.depths, self.tier_page_s, strict=True):
            seconds += max(0, min(depth, blocks) - known) * page_s
            known = max(known, depth)
        return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One request to place, and where it could go."""

    known_tokens: int
    full_blocks: int
    block_size: int
    page_bytes: int
    end_pages: float = 0.0
    """Size of the prompt's last pages in the further page group, in pages of the first group. 0: there is one group."""
    decode: tuple[WorkerView, ...]
    """Decode workers to choose from, at least one."""
    prefill: tuple[WorkerView, ...] = ()
    """Workers that can be the page source."""
    prefill_utilisation: float | None = None
    """Mean utilisation of all prefill workers. None: `prefill` has all of them."""
    block_hashes: tuple[BlockHash, ...] = ()
    """Hashes of the full blocks, for policies that remember their own decisions."""
    output_tokens: int = 0
    """Expected tokens of the output; 0 while unknown."""
    re_reference_rate: float = 0.0
    """Share of evicted blocks that later requests need, as observed so far."""
    residual_s: tuple[float, float] = (0.0, 0.0)
    """Seconds that first tokens take beyond their forecast: with a page source, and without one."""
    turn: int = 0
    """Number of this decision, for policies in which workers take turns."""
    draw: float = 0.0
    """A number in [0, 1) that breaks ties."""
    mask_s: float = 0.0
    """Predicted seconds to compute the mask of one token; 0 if any token may follow."""
    cache_key: bytes = b""
    """Digest of the client's `prompt_cache_key`: requests with the same key break ties alike. Empty: no key."""

    def new_pages(self, view: WorkerView) -> int:
        """Returns the pages that the worker has to claim for this request's full blocks."""
        have = view.depths[0] if view.page_blocks is None else view.page_blocks
        return max(0, self.full_blocks - have)

    def lacks_blocks(self, view: WorkerView) -> bool:
        """Returns whether it lacks, on the device, pages to continue after this request's full blocks."""
        return self.full_blocks > view.depths[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The predicted course of the request with one candidate. Its seconds are not priced."""

    queue_s: float = 0.0
    """Seconds until the worker that computes has computed its queue."""
    fetch_s: float = 0.0
    """Seconds to bring the prefix to the worker that computes, from a peer or a lower tier; overlaps with the queue."""
    prefill_s: float = 0.0
    """Seconds to compute the request's own prompt tokens."""
    transfer_s: float = 0.0
    """Seconds of moving pages to the decode worker that do not overlap with waiting and computing."""
    admission_s: float = 0.0
    """Seconds until the decode worker has compiled the request's output constraint, and has a slot and pages for it."""
    decode_queue_s: float = 0.0
    """Seconds for which the end of a pulled prompt waits until the decode worker has computed the ends of others."""
    tail_s: float = 0.0
    """Seconds of the decode worker's own step: the last tokens of the prompt, and the first sample."""
    residual_s: float = 0.0
    """Seconds beyond the other parts, such as those of rpcs, as learned from earlier requests."""
    cached_blocks: int = 0
    """Leading blocks that are found or fetched, and not computed."""
    computed_tokens: int = 0
    """Tokens that the page source computes, or the decode worker if there is no page source."""
    fetched_blocks: int = 0
    """Blocks that come from the peer."""
    pulled_blocks: int = 0
    """Blocks that the decode worker pulls from the page source."""
    end_pages: float = 0.0
    """Size of the further pages at the end of each pull, in pages of the first page group."""
    load_s: float = 0.0
    """Seconds that the worker that computes loads from its own lower tiers, after earlier loads have ended."""
    peer_load_s: float = 0.0
    """Seconds that the peer loads from its own lower tiers, for what it sends."""
    decode_load_s: float = 0.0
    """Seconds that the decode worker loads from its own lower tiers, in addition to its pull from the page source."""

    @property
    def own_s(self) -> float:
        """Seconds from the start of its own prefill to its first token."""
        return self.prefill_s + self.transfer_s + self.decode_queue_s + self.tail_s

    @property
    def foreseen_s(self) -> float:
        """Seconds until the first token, without the residual. Refusals use this: while every request is refused, no
        residual is learned."""
        return max(self.queue_s, self.fetch_s, self.admission_s) + self.own_s

    @property
    def first_token_s(self) -> float:
        """Seconds until the first token, with the residual."""
        return self.foreseen_s + self.residual_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """The price of one candidate, term by term, in seconds."""

    wait_s: float = 0.0
    """The longest of three waits: for the queue, for the fetched prefix, for admission at the decode worker."""
    prefill_s: float = 0.0
    """Seconds of its own prefill, times the price of a second there: what that costs other requests."""
    transfer_s: float = 0.0
    tail_s: float = 0.0
    """Seconds from the arrival of all pages to the end of the step with the first token, and the residual."""
    harm_s: float = 0.0
    """Price of the delay of other streams: by one more stream, and by a prompt that the decode worker computes."""
    damage_s: float = 0.0
    """Price of computing again what is evicted for this request."""
    damage_pages: int = 0
    """Cached pages that would be evicted. It breaks ties, even while evictions cost nothing."""

    @property
    def total_s(self) -> float:
        return self.wait_s + self.prefill_s + self.transfer_s + self.tail_s + self.harm_s + self.damage_s

    def __str__(self) -> str:
        return (
            f"price_s={self.total_s:.4f} wait_s={self.wait_s:.4f} prefill_s={self.prefill_s:.4f} "
            f"transfer_s={self.transfer_s:.4f} tail_s={self.tail_s:.4f} harm_s={self.harm_s:.4f} "
            f"damage_s={self.damage_s:.4f} damage_pages={self.damage_pages}"
        )


@dataclass(frozen=True, slots=True)
class Candidate:
    """A placement that was priced and not taken."""

    decode: WorkerId
    source: WorkerId | None
    peer: WorkerId | None
    why: Breakdown


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    decode: WorkerId
    source: WorkerId | None
    """The worker from which the decode worker pulls missing pages. None: it computes them itself."""
    peer: WorkerId | None = None
    """The worker from which the computing worker fetches the blocks of the prefix that it lacks. None: from none."""
    peer_blocks: int = 0
    """How many leading blocks the peer holds."""
    forecast: Forecast = field(default_factory=Forecast)
    why: Breakdown | None = None
    """The terms of its price. None: the policy does not price."""
    others: tuple[Candidate, ...] = field(default=(), compare=False)
    """The next best candidates, the cheapest first, for traces."""

    @property
    def computed_by(self) -> WorkerId:
        """The worker that computes the prompt: the page source, or the decode worker itself."""
        return self.source or self.decode


Policy = Callable[[Snapshot], Decision]
