"""Every candidate (decode worker, page source) priced in predicted seconds; the cheapest is taken.

A second of prefill is priced at 1 / (1 - rho) of the workers it is spent on: near saturation it delays everyone who
comes after. Computing on the decode worker itself is one more candidate, without transfer but with harm to the streams
that run there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router.policy import Breakdown, Decision, Snapshot, WorkerView, decide, held_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """What workers do not report. Simple on purpose: measured rates and a learned price model can replace them."""

    seconds_per_token: float = 1e-3
    """Where no worker has prefilled anything yet: a small model on a small CPU."""
    seconds_per_step: float = 0.03
    """Where no worker has decoded anything yet."""
    transfer_bytes_per_s: float = 1e9
    """Pages on a wire or through shared memory."""
    chunk_tokens: int = 512
    """Pages of a chunk travel while the next one computes: the last chunk's transfer stays exposed."""
    answer_tokens: int = 256
    """Typical length of an answer: how long a running sequence keeps its pages."""
    pull_overhead_s: float = 0.005
    """Round trips and the extra decode step of a pull, however few pages it brings."""
    harm_per_stream: float = 0.5
    """Price of delaying one running stream by one second, in seconds of this request's own delay."""
    streams_to_come: float = 1.0
    """Streams that a decode worker's local prefill delays besides those that run now: an idle one is about to get some,
    so equal workers keep the two strokes apart."""
    step_growth: float = 0.01
    """How much longer a decode step takes for each further sequence in it."""
    max_utilisation: float = 0.95
    """Keeps the price of a second finite (20)."""
    tie_share: float = 0.02
    """Candidates within this share of the cheapest count as equal: predictions are not better than that."""
    shortlist: int = 8
    """Workers per role of which all pairs are priced."""


def choose_cheapest(snapshot: Snapshot, coefficients: Coefficients | None = None) -> Decision:
    return _Pricing(snapshot, coefficients or Coefficients()).choose()


class _Pricing:
    """One decision; holds what all of its candidates share."""

    def __init__(self, snapshot: Snapshot, coefficients: Coefficients) -> None:
        self._snapshot = snapshot
        self._given = coefficients
        everyone = (*snapshot.prefill, *snapshot.decode)
        self._default_token_s = _mean([w.seconds_per_token for w in everyone], coefficients.seconds_per_token)
        self._default_step_s = _mean([w.seconds_per_step for w in snapshot.decode], coefficients.seconds_per_step)
        self._pool_price = self._price_of_a_second(_average([w.utilisation for w in snapshot.prefill]))

    def choose(self) -> Decision:
        decodes = _best(self._snapshot.decode, self._own_cost, self._given.shortlist)
        sources = _best(self._snapshot.prefill, self._source_cost, self._given.shortlist)
        priced: list[tuple[Breakdown, WorkerView, WorkerView | None]] = [(self._local(d), d, None) for d in decodes]
        priced += [(self._remote(d, s), d, s) for d in decodes if self._missing_blocks(d) for s in sources]
        limit = min(why.total_s for why, _, _ in priced) * (1 + self._given.tie_share)
        equal = [candidate for candidate in priced if candidate[0].total_s <= limit]
        least = min(why.damage_pages for why, _, _ in equal)
        gentlest = [candidate for candidate in equal if candidate[0].damage_pages == least]
        why, decode, source = gentlest[int(self._snapshot.draw * len(gentlest))]
        return decide(self._snapshot, decode, source, why)

    def _remote(self, decode: WorkerView, source: WorkerView) -> Breakdown:
        missing = self._missing_blocks(decode)
        computed = max(0, self._snapshot.full_blocks - held_blocks(self._snapshot, decode, source))
        queue_s = source.queued_tokens * self._token_s(source)
        prefill_s = computed * self._snapshot.block_size * self._token_s(source)
        tail = max(1, self._snapshot.known_tokens - self._snapshot.full_blocks * self._snapshot.block_size)
        tail_s = tail * self._token_s(decode)
        chunk = min(missing, max(1, self._given.chunk_tokens // self._snapshot.block_size))
        page_s = self._snapshot.page_bytes / self._given.transfer_bytes_per_s
        return Breakdown(
            queue_s=queue_s,
            prefill_s=prefill_s * self._pool_price + tail_s * self._price_of_a_second(decode.utilisation),
            transfer_s=self._given.pull_overhead_s + max(chunk * page_s, missing * page_s - queue_s - prefill_s),
            admission_s=self._admission_s(decode),
            harm_s=self._growth_s(decode) + self._delay_s(decode, tail_s),
            damage_pages=_damage(decode, missing + 1) + _damage(source, computed),
        )

    def _local(self, decode: WorkerView) -> Breakdown:
        tokens = max(1, self._snapshot.known_tokens - decode.cached_blocks * self._snapshot.block_size)
        prefill_s = tokens * self._token_s(decode)
        backlog = max(0, decode.queued_tokens - decode.running)
        return Breakdown(
            queue_s=backlog * self._token_s(decode),
            prefill_s=prefill_s * self._price_of_a_second(decode.utilisation),
            admission_s=self._admission_s(decode),
            harm_s=self._growth_s(decode) + self._delay_s(decode, prefill_s),
            damage_pages=_damage(decode, self._missing_blocks(decode) + 1),
        )

    def _missing_blocks(self, decode: WorkerView) -> int:
        return max(0, self._snapshot.full_blocks - decode.cached_blocks)

    def _delay_s(self, decode: WorkerView, prefill_s: float) -> float:
        """What computing here costs the streams that run (or will run) in the same steps."""
        return (decode.running + self._given.streams_to_come) * prefill_s * self._given.harm_per_stream

    def _admission_s(self, decode: WorkerView) -> float:
        """Until pages are free for those who wait there and for this one: running sequences return theirs in time."""
        own = self._missing_blocks(decode) + 1
        short = own * (1 + decode.waiting) - decode.pages_free - decode.pages_cached
        if short <= 0:
            return 0.0
        residence_s = self._given.answer_tokens * self._step_s(decode)
        return residence_s * min(1.0, short / max(1, decode.pages_active)) * (1 + decode.waiting)

    def _growth_s(self, decode: WorkerView) -> float:
        """What one more sequence in every step costs the streams that run there."""
        return decode.running * self._given.step_growth * self._step_s(decode) * self._given.answer_tokens

    def _own_cost(self, decode: WorkerView) -> float:
        missing = self._missing_blocks(decode) * self._snapshot.block_size
        return self._admission_s(decode) + self._growth_s(decode) + missing * self._default_token_s

    def _source_cost(self, source: WorkerView) -> float:
        missing = max(0, self._snapshot.full_blocks - source.cached_blocks) * self._snapshot.block_size
        return (source.queued_tokens + missing * self._pool_price) * self._token_s(source)

    def _price_of_a_second(self, utilisation: float) -> float:
        return 1 / (1 - min(utilisation, self._given.max_utilisation))

    def _token_s(self, worker: WorkerView) -> float:
        return worker.seconds_per_token or self._default_token_s

    def _step_s(self, worker: WorkerView) -> float:
        return worker.seconds_per_step or self._default_step_s


def _best(views: Sequence[WorkerView], cost: Callable[[WorkerView], float], count: int) -> Sequence[WorkerView]:
    return views if len(views) <= count else sorted(views, key=cost)[:count]


def _damage(worker: WorkerView, new_pages: int) -> int:
    return max(0, min(new_pages - worker.pages_free, worker.pages_cached))


def _mean(values: Sequence[float], otherwise: float) -> float:
    """Of those that are known."""
    known = [value for value in values if value > 0]
    return sum(known) / len(known) if known else otherwise


def _average(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
