"""Predicts the seconds that a request would take with one candidate. It neither prices them nor reads a clock.

A candidate has three parts: a decode worker, the worker that computes the prompt (a prefill worker or the decode worker
itself), and a peer. The computing worker fetches from the peer the prefix that it lacks. Every policy's choice is
forecast here, so that predictions can be compared with what happens.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from router.fleet.worker import LinkRate
from router.routing.policy import Decision, Forecast, Snapshot, WorkerView
from twostroke.base.ids import WorkerId
from twostroke.kv_cache.form import KvForm
from twostroke.scheduler.cost import Budget, Queued, StepCost

UNKNOWN_COST = StepCost(step_s=0.03, stream_s=3e-4, prompt_token_s=1e-3)
"""Cost while no worker has run a step: that of a small model on a small CPU."""
UNKNOWN_LINK = LinkRate(latency_s=0.005, bytes_per_s=math.inf)
"""Rate while no worker has pulled from another. It is optimistic, so that the link is used and thereby measured: a link
that is assumed to be slow may never be. A measured latency of 0 means unknown."""
MANY_LINKS = 256
"""Measured links that are looked at to estimate others: a large fleet has hundreds of thousands."""
UNKNOWN_STEP_TOKENS = 512
UNKNOWN_STEP_TARGET_S = 1.0
UNKNOWN_OUTPUT_TOKENS = 256


class PullEnd(Protocol):
    """One of the two workers of a pull, as the router knows it or as a decision sees it."""

    @property
    def kv_form(self) -> KvForm: ...

    @property
    def page_bytes(self) -> int | None:
        """Bytes of one of its pages; None while unknown."""

    @property
    def conversion_page_s(self) -> float:
        """Measured seconds to convert one page there; 0 while unknown."""


@dataclass(frozen=True, slots=True)
class PrefixHolder:
    """A worker that holds a prefix which can be fetched, and how much of it."""

    view: WorkerView
    blocks: int
    """Leading blocks to fetch; those on its lower tiers are loaded there first."""


@dataclass(frozen=True, slots=True)
class Computing:
    """The part of a forecast that depends on the worker that computes, and on no other."""

    queue_s: float
    fetch_s: float
    prefill_s: float
    cached_blocks: int
    computed_tokens: int
    fetched_blocks: int
    peer: PrefixHolder | None
    loaded_blocks: int
    """Leading blocks that it has on the device or loads from its own lower tiers."""

    @property
    def wait_s(self) -> float:
        return max(self.queue_s, self.fetch_s)


class Forecaster:
    """Forecasts for one snapshot; it keeps what all candidates share."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._admissions_s: dict[tuple[WorkerId, int], float] = {}
        self._tails_s: dict[tuple[WorkerId, bool], float] = {}
        """Cached, like `_admissions_s`: a decode worker is forecast with each page source, and its tail is the same."""

    @functools.cached_property
    def _cost(self) -> StepCost:
        """Assumed step cost of workers that have not run a step: the mean of the others."""
        return _mean_cost([view.cost for view in (*self._snapshot.prefill, *self._snapshot.decode)])

    @functools.cached_property
    def _link(self) -> LinkRate:
        """Assumed rate between workers that have not pulled from one another."""
        return _unmeasured_link((*self._snapshot.prefill, *self._snapshot.decode))

    def at_source(self, source: WorkerView, peer: PrefixHolder | None = None) -> Computing:
        """Forecasts a page source that computes the full blocks which it neither has nor fetches."""
        return self._computing(source, peer, self._snapshot.full_blocks * self._snapshot.block_size, 0)

    def at_decode(self, decode: WorkerView, peer: PrefixHolder | None = None) -> Computing:
        """Forecasts a decode worker that computes the whole prompt while its streams run."""
        return self._computing(decode, peer, self._snapshot.known_tokens, decode.running)

    def forecast(self, decode: WorkerView, computing: Computing, source: WorkerView | None) -> Forecast:
        """Forecasts the whole candidate; `source` is None where the decode worker computes."""
        if source is not None and not self._snapshot.lacks_blocks(decode):
            source, computing = None, self.at_decode(decode)
        own, transfer_s = self._transfer(decode, source, computing) if source is not None else (0, 0.0)
        admission_s = self.admission_s(decode, self._snapshot.new_pages(decode) + 1)
        arrives_s = max(computing.wait_s, admission_s) + computing.prefill_s + transfer_s
        return Forecast(
            queue_s=computing.queue_s,
            fetch_s=computing.fetch_s,
            prefill_s=computing.prefill_s,
            transfer_s=transfer_s,
            admission_s=admission_s,
            decode_queue_s=self._decode_queue_s(decode, arrives_s) if source is not None else 0.0,
            tail_s=self.tail_s(decode, pulls=source is not None),
            residual_s=self._snapshot.residual_s[source is None],
            cached_blocks=computing.cached_blocks,
            computed_tokens=computing.computed_tokens,
            fetched_blocks=computing.fetched_blocks,
            pulled_blocks=self._pulled_blocks(decode, own) if source is not None else 0,
            end_pages=self._snapshot.end_pages,
            load_s=(source or decode).load_s(computing.loaded_blocks),
            peer_load_s=0.0 if computing.peer is None else computing.peer.view.load_s(computing.peer.blocks),
            decode_load_s=decode.load_s(own),
        )

    def admission_s(self, decode: WorkerView, pages: int) -> float:
        """Returns the seconds until a slot and pages are free for this request and those that wait before it.

        It includes the seconds to compile the request's output constraint, which come first. Running sequences are
        assumed to free slots and pages evenly over the time of an output.
        """
        known_s = self._admissions_s.get((decode.worker, pages))
        if known_s is not None:
            return known_s
        admission_s = decode.compile_s
        slots_short = decode.slots_taken + 1 - decode.slots if decode.slots else 0.0
        pages_short = pages * (1 + decode.waiting) - decode.pages_free - decode.pages_cached
        if slots_short > 0 or pages_short > 0:
            residence_s = self.output_steps(decode) * self.step_s(decode)
            share = min(1.0, max(0, pages_short) / max(1, decode.pages_active)) * (1 + decode.waiting)
            admission_s += residence_s * max(share, slots_short / max(1, decode.slots))
        self._admissions_s[decode.worker, pages] = admission_s
        return admission_s

    def tail_s(self, decode: WorkerView, pulls: bool) -> float:
        """Returns the seconds of the step that samples the first token, with the end of the prompt if its blocks were
        pulled.

        It begins when the step before has ended: after half a step, on average.
        """
        known_s = self._tails_s.get((decode.worker, pulls))
        if known_s is not None:
            return known_s
        snapshot, step_s = self._snapshot, self.step_s(decode)
        rest = snapshot.known_tokens - snapshot.full_blocks * snapshot.block_size
        tail = max(0, rest - 1) if pulls else 0  # the last token runs as a stream's
        tail_s = step_s + self.cost(decode).of_prompt(tail, snapshot.known_tokens - rest, 0)
        tail_s += step_s / 2 if decode.running else 0.0
        self._tails_s[decode.worker, pulls] = tail_s
        return tail_s

    def step_s(self, decode: WorkerView) -> float:
        """Returns the seconds of a step with this request among its streams."""
        context = decode.pages_active * self._snapshot.block_size + self._snapshot.known_tokens
        return self.cost(decode).of_streams(decode.running + 1, context) + self._snapshot.mask_s

    def cost(self, view: WorkerView) -> StepCost:
        return view.cost if view.cost.prompt_token_s > 0 or view.cost.step_s > 0 else self._cost

    def output_steps(self, decode: WorkerView) -> float:
        """Returns how many steps an output is expected to take there."""
        return (self._snapshot.output_tokens or UNKNOWN_OUTPUT_TOKENS) / decode.step_tokens_each

    def _computing(self, worker: WorkerView, peer: PrefixHolder | None, tokens: int, streams: int) -> Computing:
        """Forecasts the computation of `tokens` while `streams` share the steps. Loads from tiers if that is faster."""
        size = self._snapshot.block_size
        best: Computing | None = None
        peer_s = 0.0 if peer is None else peer.view.loaded_in_s(peer.blocks)
        for depth in self._usable_depths(worker):
            fetch_s, cached, fetched = worker.loaded_in_s(depth), depth, 0
            if peer is not None and peer.blocks > depth and self._pays(worker, depth, peer.blocks, peer_s):
                cached, fetched = peer.blocks, peer.blocks - depth
                fetch_s += self._fetch_s(worker, peer, fetched)
            left = max(0, tokens - cached * size)
            prefill_s = self._prefill_s(worker, left, cached * size, streams)
            sender = peer if fetched else None
            found = Computing(worker.queue_s, fetch_s, prefill_s, cached, left, fetched, sender, depth)
            if best is None or found.wait_s + prefill_s < best.wait_s + best.prefill_s:
                best = found
        assert best is not None, "every worker has a device tier"
        return best

    def _prefill_s(self, worker: WorkerView, tokens: int, context_tokens: int, streams: int) -> float:
        """Returns the seconds of computing `tokens` after `context_tokens` of the prompt."""
        cost, step_tokens = self.cost(worker), worker.step_tokens or UNKNOWN_STEP_TOKENS
        if not streams:
            return cost.of_prompt(tokens, context_tokens, step_tokens)
        budget = Budget(worker.step_target_s or UNKNOWN_STEP_TARGET_S, cost, step_tokens)
        beside = worker.pages_active * self._snapshot.block_size
        return budget.drain_s(Queued(tokens, tokens * (context_tokens + tokens / 2), streams, beside), step_tokens)

    def _fetch_s(self, worker: WorkerView, peer: PrefixHolder, blocks: int) -> float:
        link = self._link_from(peer.view, worker)
        waits_s = max(worker.fetch_wait_s, peer.view.serve_wait_s)
        one_s = page_s(peer.view, worker, self._snapshot.page_bytes, link.bytes_per_s)
        carried_s = link.latency_s + (blocks + self._snapshot.end_pages) * one_s
        return waits_s + peer.view.loaded_in_s(peer.blocks) + carried_s

    def _link_from(self, source: WorkerView, target: WorkerView) -> LinkRate:
        """Returns the measured rate, or what `_link` assumes for an unknown one."""
        link = target.links.get(source.worker, self._link)
        return link if link.latency_s else LinkRate(self._link.latency_s, link.bytes_per_s)

    def _pulled_blocks(self, decode: WorkerView, own: int) -> int:
        """Returns the blocks whose pages are pulled, besides the first `own` that it has or loads."""
        return max(0, self._snapshot.full_blocks - max(own, decode.page_blocks or 0))

    def _usable_depths(self, worker: WorkerView) -> Sequence[int]:
        """Returns the leading blocks that the worker has after loading from each tier that is worth it."""
        if len(worker.depths) == 1:
            return worker.depths
        begin = worker.depths[0]
        return [depth for depth in worker.depths if self._pays(worker, begin, depth, worker.loaded_in_s(depth))]

    def _pays(self, worker: WorkerView, begin: int, end: int, load_s: float) -> bool:
        """Returns whether loading the blocks from `begin` to `end` is faster than computing them. Else workers compute.

        The comparison leaves out that loads overlap with waiting: they hold pages meanwhile, and delay later loads.
        """
        if not load_s:
            return True
        size, step_tokens = self._snapshot.block_size, worker.step_tokens or UNKNOWN_STEP_TOKENS
        return load_s < self.cost(worker).of_prompt((end - begin) * size, begin * size, step_tokens)

    def _transfer(self, decode: WorkerView, source: WorkerView, computing: Computing) -> tuple[int, float]:
        """Returns how many leading blocks the decode worker has or loads, and the exposed seconds of pulling the rest.

        Pages of a chunk travel while the next one is computed. Exposed are the pages of the last chunk, and what the
        network and the tiers cannot carry until then.
        """
        own = self._usable_depths(decode)[-1]
        missing = self._pulled_blocks(decode, own) + self._snapshot.end_pages
        link = self._link_from(source, decode)
        one_s = page_s(source, decode, self._snapshot.page_bytes, link.bytes_per_s)
        chunk = max(1, (source.step_tokens or UNKNOWN_STEP_TOKENS) // self._snapshot.block_size)
        hidden_s = computing.wait_s + computing.prefill_s
        carried_s = max(decode.fetch_wait_s, source.serve_wait_s) + missing * one_s
        transfer_s = link.latency_s + max(min(missing, chunk) * one_s, carried_s - hidden_s)
        return own, max(transfer_s, decode.loaded_in_s(own) - hidden_s)

    def _decode_queue_s(self, decode: WorkerView, arrives_s: float) -> float:
        """Returns the seconds for which the end of a pulled prompt waits for the ends of others, after its pages came.

        Ends of less than a block run before all longer prompts, so each request delays it by less than a block.
        """
        ends_s = self.cost(decode).of_prompt(
            decode.requests * (self._snapshot.block_size - 1), 0, decode.step_tokens or UNKNOWN_STEP_TOKENS
        )
        return still_queued_s(min(decode.queue_s, ends_s), arrives_s)


def still_queued_s(queue_s: float, arrives_s: float) -> float:
    """Returns how much of `queue_s` seconds of work is left, on average, for something that arrives after `arrives_s`.

    Some of that work is done by then, and other work has arrived. So the worker is assumed to be busy with a
    probability of queue_s / (queue_s + arrives_s).
    """
    return queue_s / (1 + arrives_s / queue_s) if queue_s > 0 else 0.0


def page_s(source: PullEnd, target: PullEnd, usual_bytes: int, bytes_per_s: float) -> float:
    """Returns the seconds to send one page and, if forms differ, to convert it. A target of unknown page size has pages
    of `usual_bytes`.

    Either side can convert. Workers choose the cheaper one for each pull, so the faster of both counts.
    """
    target_bytes = usual_bytes if target.page_bytes is None else target.page_bytes
    if source.kv_form == target.kv_form:
        return target_bytes / bytes_per_s
    at_source_s = source.conversion_page_s + target_bytes / bytes_per_s
    if not target.conversion_page_s or source.page_bytes is None:
        return at_source_s
    return min(at_source_s, target.conversion_page_s + source.page_bytes / bytes_per_s)


def decide(snapshot: Snapshot, decode: WorkerView, source: WorkerView | None) -> Decision:
    """Returns the decision for one pair, with its forecast, for policies without peers and prices.

    If the decode worker lacks no blocks, there is no page source.
    """
    if not snapshot.lacks_blocks(decode):
        source = None
    forecaster = Forecaster(snapshot)
    computing = forecaster.at_decode(decode) if source is None else forecaster.at_source(source)
    return Decision(
        decode=decode.worker,
        source=source.worker if source is not None else None,
        forecast=forecaster.forecast(decode, computing, source),
    )


def _mean_cost(costs: Iterable[StepCost]) -> StepCost:
    """Averages the costs that are known."""
    known = [cost for cost in costs if cost.prompt_token_s > 0 or cost.step_s > 0]
    prompts = [cost for cost in known if cost.prompt_token_s > 0]
    streams = [cost for cost in known if cost.step_s > 0]
    return StepCost(
        step_s=_mean([cost.step_s for cost in streams], UNKNOWN_COST.step_s),
        stream_s=_mean([cost.stream_s for cost in streams], UNKNOWN_COST.stream_s),
        context_token_s=_mean([cost.context_token_s for cost in streams], 0.0),
        prompt_token_s=_mean([cost.prompt_token_s for cost in prompts], UNKNOWN_COST.prompt_token_s),
        prompt_step_s=_mean([cost.prompt_step_s for cost in prompts], 0.0),
        prompt_pair_s=_mean([cost.prompt_pair_s for cost in prompts], 0.0),
    )


def _unmeasured_link(views: Iterable[WorkerView]) -> LinkRate:
    """Returns the mean latency of measured links, and the highest rate: one slow link says little about others."""
    links = list(itertools.islice((link for view in views for link in view.links.values()), MANY_LINKS))
    latencies_s = [link.latency_s for link in links if link.latency_s]
    bytes_per_s = max((link.bytes_per_s for link in links), default=UNKNOWN_LINK.bytes_per_s)
    return LinkRate(_mean(latencies_s, UNKNOWN_LINK.latency_s), bytes_per_s)


def _mean(values: list[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise
