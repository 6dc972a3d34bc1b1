"""Prices every candidate (decode worker, page source, peer) in predicted seconds, and takes the cheapest.

A second of prefill is priced at 1 / (1 - rho), where rho is the utilisation of the workers it is spent on. Near
saturation it delays all later requests by that much (the busy period of an M/G/1 queue). A prefix that a peer holds may
be fetched instead of computed, while the queue drains. Computing on the decode worker is one more candidate, without
transfer but with harm to the streams that run there.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from router.routing.forecast import Computing, Forecaster, PrefixHolder
from router.routing.policy import Breakdown, Candidate, Decision, Forecast, Snapshot, WorkerView
from twostroke.base.ids import WorkerId
from twostroke.kv_cache.form import KvForm

Item = TypeVar("Item")

MOST_OTHERS = 4
"""Most candidates that a decision lists besides the chosen one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Constants of the price. All its other inputs are measured."""

    harm_per_stream: float = 0.3
    """Price of delaying one running stream by a second, in seconds of this request's own delay."""
    streams_to_come: float = 1.0
    """Streams that a prompt on a decode worker delays, besides the average number of running ones. So an idle fleet
    prefers prefill workers for prompts."""
    max_utilisation: float = 0.95
    """Utilisation from which on the price of a second stays the same (20 seconds)."""
    tie_share: float = 0.02
    """Candidates at most this share above the cheapest count as equal: predictions are not more exact."""
    tie_s: float = 0.005
    """Candidates at most this many seconds above the cheapest count as equal, too."""
    shortlist: int = 6
    """Most page sources, decode workers that pull, and decode workers that compute. All their pairs are priced."""
    pulls_from_peers: bool = True
    computes_locally: bool = True
    computes_remotely: bool = True


@dataclass(frozen=True, slots=True)
class _Candidate:
    decode: WorkerView
    source: WorkerView | None
    computing: Computing
    forecast: Forecast
    why: Breakdown


class Priced:
    def __init__(self, prices: Prices | None = None) -> None:
        self._prices = prices or Prices()

    def __call__(self, snapshot: Snapshot) -> Decision:
        return _Pricing(snapshot, self._prices).choose()


class _Pricing:
    """Prices the candidates of one decision, and keeps what they share."""

    def __init__(self, snapshot: Snapshot, prices: Prices) -> None:
        self._snapshot = snapshot
        self._prices = prices
        self._forecaster = Forecaster(snapshot)
        utilisation = snapshot.prefill_utilisation
        if utilisation is None:
            utilisation = _average([view.utilisation for view in snapshot.prefill])
        self._pool_price = self._price_of_a_second(utilisation)
        self._streams = _average([view.running for view in snapshot.decode])
        self._holders: dict[KvForm, list[list[PrefixHolder]]] = {}
        """`_best_of` the possible peers, by the form of the pages that the fetching worker has."""

    def choose(self) -> Decision:
        candidates = [*self._local_candidates(), *self._remote_candidates()]
        prices = [candidate.why.total_s for candidate in candidates]
        chosen = self._cheapest(candidates, prices)
        peer = chosen.computing.peer
        return Decision(
            decode=chosen.decode.worker,
            source=chosen.source.worker if chosen.source is not None else None,
            peer=peer.view.worker if peer is not None else None,
            peer_blocks=peer.blocks if peer is not None else 0,
            forecast=chosen.forecast,
            why=chosen.why,
            others=_next_best(candidates, prices, chosen),
        )

    def _local_candidates(self) -> list[_Candidate]:
        """Returns the candidates whose decode worker computes the prompt.

        Without `computes_locally` they lack no blocks, unless there is no prefill worker.
        """
        decodes: Sequence[WorkerView] = self._snapshot.decode
        if self._snapshot.prefill and not self._prices.computes_locally:
            decodes = [view for view in decodes if not self._snapshot.lacks_blocks(view)]
        ways = [(view, way) for view in decodes for way in self._ways(view, self._forecaster.at_decode)]

        def cost_s(pair: tuple[WorkerView, Computing]) -> float:
            view, way = pair
            wait_s = max(way.wait_s, self._forecaster.admission_s(view, self._snapshot.new_pages(view) + 1))
            return (
                wait_s + way.prefill_s * self._price_of_a_second(view.utilisation) + self._harm_s(view, way.prefill_s)
            )

        return [self._candidate(view, None, way) for view, way in _least(ways, cost_s, self._prices.shortlist)]

    def _remote_candidates(self) -> list[_Candidate]:
        """Returns candidates of a prefill worker and a decode worker that lacks blocks."""
        decodes = [view for view in self._snapshot.decode if self._snapshot.lacks_blocks(view)]
        if self._snapshot.prefill and not self._prices.computes_remotely and self._snapshot.decode:
            return []

        def decode_s(view: WorkerView) -> float:
            admission_s = self._forecaster.admission_s(view, self._snapshot.new_pages(view) + 1)
            return admission_s + self._forecaster.tail_s(view, pulls=True) + self._harm_s(view, 0.0)

        def source_s(pair: tuple[WorkerView, Computing]) -> float:
            return pair[1].wait_s + pair[1].prefill_s * self._pool_price

        at_source = self._forecaster.at_source
        ways = [(view, way) for view in self._snapshot.prefill for way in self._ways(view, at_source)]
        best_ways = _least(ways, source_s, self._prices.shortlist)
        return [
            self._candidate(decode, source, way)
            for decode in _least(decodes, decode_s, self._prices.shortlist)
            for source, way in best_ways
        ]

    def _cheapest(self, candidates: Sequence[_Candidate], prices: Sequence[float]) -> _Candidate:
        """Returns the cheapest candidate; of equals the first by `_order`, then by the draw.

        For a request with a key, it is the first of equals by `_keyed_order`.
        """
        least_s = min(prices)
        limit_s = least_s + max(self._prices.tie_s, least_s * self._prices.tie_share)
        equal = [candidate for candidate, price_s in zip(candidates, prices, strict=True) if price_s <= limit_s]
        if key := self._snapshot.cache_key:
            return min(equal, key=lambda candidate: _keyed_order(candidate, key))
        best_order = min(map(_order, equal))
        best = [candidate for candidate in equal if _order(candidate) == best_order]
        return best[int(self._snapshot.draw * len(best))]

    def _candidate(self, decode: WorkerView, source: WorkerView | None, computing: Computing) -> _Candidate:
        forecast = self._forecaster.forecast(decode, computing, source)
        price = self._pool_price if source is not None else self._price_of_a_second(decode.utilisation)
        damage_pages = _victims(decode, self._snapshot.new_pages(decode) + 1)
        if source is not None:
            damage_pages += _victims(source, self._snapshot.new_pages(source))
        block_s = self._snapshot.block_size * self._forecaster.cost(decode).prompt_token_s
        why = Breakdown(
            wait_s=max(forecast.queue_s, forecast.fetch_s, forecast.admission_s),
            prefill_s=forecast.prefill_s * price,
            transfer_s=forecast.transfer_s,
            tail_s=forecast.decode_queue_s + forecast.tail_s + forecast.residual_s,
            harm_s=self._harm_s(decode, 0.0 if source is not None else forecast.prefill_s),
            damage_s=damage_pages * self._snapshot.re_reference_rate * block_s * self._pool_price,
            damage_pages=damage_pages,
        )
        return _Candidate(decode, source, computing, forecast, why)

    def _harm_s(self, decode: WorkerView, prefill_s: float) -> float:
        """Prices the delay of running streams: one more stream, with its masks, makes each step longer, and a prompt
        that is computed here shares their steps.

        Longer steps cost less the shorter they are than their target: streams need not be faster. A prompt is priced
        by the average number of streams of decode workers: a worker that has fewer now will get the next ones.
        """
        cost, step_s = self._forecaster.cost(decode), self._forecaster.step_s(decode)
        growth_s = cost.stream_s + cost.context_token_s * self._snapshot.known_tokens + self._snapshot.mask_s
        nearness = min(1.0, step_s / decode.step_target_s) if decode.step_target_s > 0 else 1.0
        delay_s = decode.running * growth_s * self._forecaster.output_steps(decode) * nearness
        delay_s += (self._streams + self._prices.streams_to_come) * prefill_s
        return delay_s * self._prices.harm_per_stream

    def _ways(self, worker: WorkerView, at: Callable[..., Computing]) -> Iterable[Computing]:
        """Yields the ways to compute the prompt at `worker`: alone, or after fetching from a best holder.

        It may also fetch blocks that it has, but only on a lower tier.
        """
        yield at(worker)
        if not self._prices.pulls_from_peers:
            return
        for holders in self._best_holders(worker.kv_form):
            peer = next((peer for peer in holders if peer.view.worker != worker.worker), None)
            if peer is not None and peer.blocks > worker.depths[0]:
                yield at(worker, peer)

    def _best_holders(self, form: KvForm) -> list[list[PrefixHolder]]:
        """Returns `_best_of` the workers whose pages can be pulled into pages of this form."""
        known = self._holders.get(form)
        if known is None:
            views = (*self._snapshot.prefill, *self._snapshot.decode)
            known = self._holders[form] = _best_of([view for view in views if form.takes(view.kv_form)])
        return known

    def _price_of_a_second(self, utilisation: float) -> float:
        return 1 / (1 - min(utilisation, self._prices.max_utilisation))


def _best_of(views: Sequence[WorkerView]) -> list[list[PrefixHolder]]:
    """Returns for each tier the two workers that hold the most blocks down to it, if these are more than above it.

    Of equal ones, the first is the one that can send them soonest. Two, because no worker is its own peer.
    """
    best: list[list[PrefixHolder]] = []
    for tier in range(max((len(view.resident) for view in views), default=0)):
        holding = [PrefixHolder(view, blocks) for view in views if (blocks := view.resident_down_to(tier))]
        holding.sort(key=lambda peer: (-peer.blocks, peer.view.load_s(peer.blocks) + peer.view.serve_wait_s))
        if holding and (not best or holding[0].blocks > best[-1][0].blocks):
            best.append(holding[:2])
    return best


def _order(candidate: _Candidate) -> tuple[bool, int, int, int]:
    """Orders equal candidates: those without a peer first, then by damage, tokens to compute at both workers, requests.

    Prices that count as equal may differ by a little work, which later requests would wait for.
    """
    queued_tokens = candidate.decode.queued_tokens
    if candidate.source is not None:
        queued_tokens += candidate.source.queued_tokens
    return candidate.computing.peer is not None, candidate.why.damage_pages, queued_tokens, candidate.decode.requests


def _next_best(candidates: Sequence[_Candidate], prices: Sequence[float], chosen: _Candidate) -> tuple[Candidate, ...]:
    """Returns the cheapest candidates of other pairs of workers than the chosen one, one for each pair."""
    others: dict[tuple[WorkerId, WorkerId | None], Candidate] = {}
    taken = _pair(chosen)
    for at in sorted(range(len(candidates)), key=prices.__getitem__):
        candidate = candidates[at]
        pair = _pair(candidate)
        if pair == taken or pair in others:
            continue
        peer = candidate.computing.peer
        others[pair] = Candidate(*pair, None if peer is None else peer.view.worker, candidate.why)
        if len(others) == MOST_OTHERS:
            break
    return tuple(others.values())


def _pair(candidate: _Candidate) -> tuple[WorkerId, WorkerId | None]:
    return candidate.decode.worker, None if candidate.source is None else candidate.source.worker


def _keyed_order(candidate: _Candidate, key: bytes) -> tuple[bool, int, bytes, bytes]:
    """Orders equal candidates for a request with a key, so that requests with the same key go to the same worker.

    This is rendezvous hashing (Thaler and Ravishankar, 1998): every router orders the workers alike, and a worker that
    joins or leaves moves only its own keys.
    """
    computing = candidate.decode if candidate.source is None else candidate.source
    first, second = (_point(key, view) for view in (computing, candidate.decode))
    return candidate.computing.peer is not None, candidate.why.damage_pages, first, second


def _point(key: bytes, view: WorkerView) -> bytes:
    return hashlib.blake2b(view.worker.encode(), key=key, digest_size=8).digest()


def _least(items: Sequence[Item], cost_s: Callable[[Item], float], count: int) -> list[Item]:
    return list(items) if len(items) <= count else heapq.nsmallest(count, items, key=cost_s)


def _victims(view: WorkerView, new_pages: int) -> int:
    return max(0, min(new_pages - view.pages_free, view.pages_cached))


def _average(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
