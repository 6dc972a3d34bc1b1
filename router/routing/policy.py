"""What a routing decision is made of: frozen values, so that the router and the simulator share it.

A policy has no clock, no socket and no log. What changes from call to call (the turn, the draw that breaks ties) comes
with the snapshot. A policy that goes by its own history remembers what it chose, and nothing else.
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
    """One worker as this decision sees it: its own report plus what was placed there since."""

    worker: WorkerId
    queue_s: float = 0.0
    """Predicted seconds until every prompt token that it has to compute is computed."""
    queued_tokens: int = 0
    """Tokens that are known but not computed yet."""
    requests: int = 0
    """Pulls or requests that it has or will have, in whatever stage."""
    running: int = 0
    """Sequences that hold pages."""
    waiting: int = 0
    """Requests or pulls that hold nothing yet."""
    slots: int = 0
    """Sequences that can hold pages at once; 0 while unknown."""
    slots_taken: float = 0.0
    """Slots that its requests take, with those placed before this one; more than there are where some have to wait."""
    pages_free: int = 0
    pages_cached: int = 0
    """Pages with blocks that no request uses at the moment: reusable, at the price of forgetting them."""
    pages_active: int = 0
    cost: StepCost = UNKNOWN
    """Cost of its steps, with the tokens that it proposes; zeros while unknown."""
    step_tokens_each: float = 1.0
    """Tokens of each stream that one of its steps makes known, on average."""
    step_tokens: int = 0
    """Most tokens in one step; 0 while unknown."""
    step_target_s: float = 0.0
    """Length of its steps in which streams run; 0 while unknown."""
    depths: tuple[int, ...] = (0,)
    """How many of this request's first blocks it holds or is about to hold, down to each tier: on the device; there or
    in host memory; there, in host memory or on disk."""
    resident: tuple[int, ...] = (0,)
    """How many of those are there already, down to each tier: what others can fetch from it."""
    page_blocks: int | None = None
    """How many of this request's first blocks have pages there in the first group, whatever others lack; None where
    there is one group."""
    tier_page_s: tuple[float, ...] = (0.0,)
    """Measured seconds to bring one page up from each of those tiers; 0 for the device."""
    kv_form: KvForm = UNKNOWN_FORM
    """The form of its pages."""
    page_bytes: int | None = None
    """Bytes of one of its pages; None: the snapshot's."""
    conversion_page_s: float = 0.0
    """Measured seconds to convert one page there, between the forms of prefill and decode workers."""
    links: Mapping[WorkerId, LinkRate] = field(default_factory=lambda: NO_LINKS)
    """Rates of its pulls, by worker."""
    fetch_wait_s: float = 0.0
    """Seconds until the pages that it pulls for earlier requests have come, if its wire never rests."""
    serve_wait_s: float = 0.0
    """Seconds until the pages that others pull from it have gone."""
    load_wait_s: float = 0.0
    """Seconds until the blocks that it loads from lower tiers for earlier requests have come."""
    utilisation: float = 0.0
    """Share of the last minute that it spent on prompt tokens."""
    compile_s: float = 0.0
    """Predicted seconds until it has compiled what the answer must match; 0 where it has compiled it before."""

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
        """Returns predicted seconds until they are there, behind earlier loads; 0 where nothing is loaded."""
        load_s = self.load_s(blocks)
        return self.load_wait_s + load_s if load_s else 0.0

    def load_s(self, blocks: int) -> float:
        """Returns seconds of bringing the first `blocks` up to the device, as far as it has them on lower tiers."""
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
    """Size of the further pages at the end of the prompt, in pages. 0 where there is one page group."""
    decode: tuple[WorkerView, ...]
    """Never empty."""
    prefill: tuple[WorkerView, ...] = ()
    """Workers that can be the page source."""
    prefill_utilisation: float | None = None
    """Mean utilisation of all prefill workers, where `prefill` has some of them only."""
    block_hashes: tuple[BlockHash, ...] = ()
    """Hashes of the full blocks, for policies that go by their own history."""
    output_tokens: int = 0
    """Expected length of the output; 0 where nothing is known."""
    re_reference_rate: float = 0.0
    """Share of evicted blocks that requests ask for later, as seen so far."""
    residual_s: tuple[float, float] = (0.0, 0.0)
    """What first tokens take beyond the forecast: where a page source computes, and where the decode worker does."""
    turn: int = 0
    """Counts decisions."""
    draw: float = 0.0
    """A number in [0, 1) that breaks ties."""
    mask_s: float = 0.0
    """Predicted seconds of one token's mask; 0 where every token may follow."""
    cache_key: bytes = b""
    """Digest of the client's hint which requests have prefixes in common: those with the same key break ties alike."""

    def new_pages(self, view: WorkerView) -> int:
        """Returns the pages that this request's full blocks take there, besides those with blocks on the device."""
        have = view.depths[0] if view.page_blocks is None else view.page_blocks
        return max(0, self.full_blocks - have)

    def lacks_blocks(self, view: WorkerView) -> bool:
        """Returns whether it lacks something, on the device, to continue after this request's full blocks."""
        return self.full_blocks > view.depths[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What will happen to the request with one candidate, in predicted seconds, nothing priced."""

    queue_s: float = 0.0
    """Seconds until the worker that computes has done its queue."""
    fetch_s: float = 0.0
    """Seconds to bring the prefix to the worker that computes, from a peer or a lower tier; overlaps with the queue."""
    prefill_s: float = 0.0
    """Seconds to compute the request's own prompt tokens."""
    transfer_s: float = 0.0
    """Seconds of moving pages to the decode worker that do not overlap with waiting and computing."""
    admission_s: float = 0.0
    """Seconds until the decode worker has compiled what its answer must match, and has pages for it."""
    decode_queue_s: float = 0.0
    """Seconds for which the end of a pulled prompt waits until the decode worker has computed the ends of others."""
    tail_s: float = 0.0
    """Seconds of the decode worker's own step: the last tokens of the prompt, and the first sample."""
    residual_s: float = 0.0
    """Rpcs and the like, as learned from earlier requests."""
    cached_blocks: int = 0
    """Leading blocks that are not computed."""
    computed_tokens: int = 0
    """Tokens that the page source computes, or the decode worker where there is none."""
    fetched_blocks: int = 0
    """Blocks that come from the peer."""
    pulled_blocks: int = 0
    """Blocks that the decode worker pulls from the page source."""
    end_pages: float = 0.0
    """Size of the further pages at the end of each pull, in pages."""
    load_s: float = 0.0
    """Seconds that the worker that computes loads from its own lower tiers, without waiting for others' loads."""
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
        """Seconds until the first token, as the parts say. Refusals go by this: while every request is refused, nothing
        is learned about the residual."""
        return max(self.queue_s, self.fetch_s, self.admission_s) + self.own_s

    @property
    def first_token_s(self) -> float:
        """Seconds until the first token, with the residual."""
        return self.foreseen_s + self.residual_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """The price of one candidate, term by term, in seconds."""

    wait_s: float = 0.0
    """The longest of queue, fetching the prefix, and admission at the decode worker."""
    prefill_s: float = 0.0
    """Own prefill, priced by what a second there costs all other requests."""
    transfer_s: float = 0.0
    tail_s: float = 0.0
    """Seconds of the decode worker's own step, with the residual and what it computes before."""
    harm_s: float = 0.0
    """Delay of streams: by one more on this decode worker, and by a prompt that it computes."""
    damage_s: float = 0.0
    """What will be computed again because it is evicted for this."""
    damage_pages: int = 0
    """Cached pages that would be forgotten: breaks ties, whatever they turn out to be worth."""

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
    """The worker from which the decode worker pulls missing pages; None: it computes them itself."""
    peer: WorkerId | None = None
    """The worker from which the one that computes pulls the part of the prefix that it lacks."""
    peer_blocks: int = 0
    """How many leading blocks the peer holds."""
    forecast: Forecast = field(default_factory=Forecast)
    why: Breakdown | None = None
    """None: the policy does not price."""
    others: tuple[Candidate, ...] = field(default=(), compare=False)
    """The next best candidates, the cheapest first, for people who ask why."""

    @property
    def computed_by(self) -> WorkerId:
        """The worker that computes the prompt: the page source, or the decode worker itself."""
        return self.source or self.decode


Policy = Callable[[Snapshot], Decision]
