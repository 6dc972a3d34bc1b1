"""Makes a snapshot of the workers, has the policy choose, and reserves the choice before the next one.

The live router and the simulator use this one class: it has no clock and no socket.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from router.fleet.worker import Shape, Worker
from router.routing.candidates import BY_QUEUE, BY_STREAMS, WHOLE, Candidates, Need
from router.routing.forecast import UNKNOWN_LINK, page_s
from router.routing.learned import PredictionResidual, Setups
from router.routing.policy import NO_LINKS, Decision, Policy, Snapshot, WorkerView
from router.routing.prefix_index import PrefixIndex
from router.routing.reservations import Reservations, ReservedShare
from twostroke.base.ids import BlockHash, WorkerId
from twostroke.request import Attempt

OUTPUT_MEMORY = 0.02
"""Weight of the latest output in the expected length of the next one: the last fifty count most."""
TOKEN_MEMORY = 0.1
"""Weight of the latest request in the expected time between two tokens, which changes as soon as load does."""

NOTHING_PASSED: Mapping[WorkerId, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingParams:
    """What routers need to know of a request, and workers do not."""

    priority: int = 0
    """Class of the request. In the admission queue, higher classes go first."""
    tenant: str = ""
    """Tenant of the request. In the admission queue, tenants take turns."""
    takes_converted: bool = True
    """Whether it may be served by pages that were converted from another form."""
    cache_key: bytes = b""
    """Digest of the client's `prompt_cache_key`, a hint that requests with one key share prefixes. Empty: none. It does
    not decide who may share blocks."""
    compile_s: float = 0.0
    """Seconds that this router took to compile the request's output constraint."""
    mask_s: float = 0.0
    """Average seconds of one token mask of the request's output constraint, as measured here."""


class Routable(Protocol):
    """The properties of a request on which the choice of workers depends."""

    @property
    def attempt(self) -> Attempt: ...

    @property
    def routing(self) -> RoutingParams: ...


@dataclass(frozen=True)
class Workers:
    """The workers that serve now."""

    shape: Shape
    decode: Sequence[Worker]
    prefill: Sequence[Worker]

    @functools.cached_property
    def by_id(self) -> dict[WorkerId, Worker]:
        return {worker.worker_id: worker for worker in (*self.prefill, *self.decode)}

    def can_serve(self, decision: Decision) -> bool:
        """Returns whether all workers of the decision are among these."""
        return all(worker in self.by_id for worker in (decision.decode, decision.source, decision.peer) if worker)


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Leading blocks of one request by worker, down to each tier, as `PrefixIndex.leading_blocks` returns them."""

    resident: dict[WorkerId, tuple[int, ...]]
    """Blocks that the workers hold."""
    held: dict[WorkerId, tuple[int, ...]]
    """Blocks that the workers hold or are about to hold."""
    pages: dict[WorkerId, tuple[int, ...]] | None = None
    """Blocks with pages in the first group, held or about to be. None: there is only one group."""


class Selector:
    def __init__(
        self,
        policy: Policy,
        index: PrefixIndex,
        reservations: Reservations,
        *,
        seed: int | None,
        narrows: bool = False,
    ) -> None:
        """`narrows`: in a large fleet, the policy gets only some candidates."""
        self._policy = policy
        self._narrows = narrows
        self._decode = Candidates((BY_STREAMS, BY_QUEUE), reservations, seed)
        self._prefill = Candidates((BY_QUEUE,), reservations, seed)
        self._index = index
        self._reservations = reservations
        self._draws = random.Random(seed)
        self._turn = 0
        self.output_tokens = 0.0
        """Expected tokens of the next output; 0 while unknown."""
        self.token_s = 0.0
        """Expected seconds from one token of an output to the next; 0 while unknown."""
        self._residuals = PredictionResidual(), PredictionResidual()
        """Residuals of prompts that a page source computes, and of those that the decode worker computes."""
        self._fetching_until_s: dict[WorkerId, float] = {}
        self._serving_until_s: dict[WorkerId, float] = {}
        """When each worker's pulls from others (fetching) and those of others from it (serving) will be done."""
        self._setups = Setups()
        self._loading_until_s: dict[WorkerId, float] = {}
        """When each worker's loads from its lower tiers will be done. They run one after the other."""

    def select(
        self,
        request: Routable,
        workers: Workers,
        now_s: float,
        *,
        passes_s: Mapping[WorkerId, float] = NOTHING_PASSED,
        is_tentative: bool = False,
    ) -> Decision:
        """Returns the decision, and reserves it under the request's id until `Reservations.end` is called.

        `passes_s`: for each worker, the reserved seconds of requests that this one overtakes. `is_tentative`: the
        request waits, and `dispatched` will be called when it is sent.
        """
        prefixes = self._look_up(_useful_hashes(request), workers)
        snapshot = self._snapshot(request, prefixes, workers, now_s, passes_s)
        cached = max(view.cached_blocks for view in (*snapshot.decode, *snapshot.prefill))
        self._index.re_reference.asked(request.attempt.block_hashes[cached:])
        decision = self._with_source_of_coming_blocks(snapshot, prefixes, self._policy(snapshot))
        self._turn += 1
        self._reservations.place(request.attempt.request_id, _shares(snapshot, decision), request.attempt.block_hashes)
        if not is_tentative:
            self.dispatched(request, decision, workers, now_s)
        return decision

    def dispatched(self, request: Routable, decision: Decision, workers: Workers, now_s: float) -> None:
        """Notes that the decision is carried out now: its pulls and loads delay later ones of the same workers."""
        if (decode := workers.by_id.get(decision.decode)) is not None:
            self._setups.placed(decode, request.attempt.request)
        forecast, taker = decision.forecast, decision.computed_by
        pulls = [(decision.peer, taker, forecast.fetched_blocks)]
        pulls.append((decision.source, decision.decode, forecast.pulled_blocks))
        end_pages = forecast.end_pages
        for source, target, pages in pulls:
            if source is None or not pages:
                continue
            seconds = (pages + end_pages) * _pull_page_s(workers, source, target)
            for until_s, worker in ((self._fetching_until_s, target), (self._serving_until_s, source)):
                _extend(until_s, worker, seconds, now_s, len(workers.by_id))
        loads = ((taker, forecast.load_s), (decision.peer, forecast.peer_load_s))
        for worker_id, seconds in (*loads, (decision.decode, forecast.decode_load_s)):
            if worker_id is not None and seconds:
                _extend(self._loading_until_s, worker_id, seconds, now_s, len(workers.by_id))

    def snapshot(
        self, request: Routable, workers: Workers, now_s: float, *, passes_s: Mapping[WorkerId, float] = NOTHING_PASSED
    ) -> Snapshot:
        """Returns the snapshot that the policy would get."""
        return self._snapshot(request, self._look_up(_useful_hashes(request), workers), workers, now_s, passes_s)

    def _look_up(self, hashes: Sequence[BlockHash], workers: Workers) -> Prefixes:
        tail, coming = workers.shape.tail_blocks, self._reservations.coming
        resident = held = self._index.leading_blocks(hashes, tail_blocks=tail)
        is_coming = bool(hashes) and any(True for _ in coming(hashes[0]))
        if not tail:
            return Prefixes(resident, self._index.leading_blocks(hashes, coming) if is_coming else held)
        if is_coming:
            # Computing makes further pages of all blocks, for a while. A pull brings only those of the last blocks.
            computing = {worker.worker_id for worker in workers.prefill}
            held = self._index.leading_blocks(
                hashes,
                coming,
                tail_blocks=tail,
                also_parts=lambda block_hash: (worker for worker in coming(block_hash) if worker in computing),
            )
        return Prefixes(resident, held, self._index.leading_blocks(hashes, coming if is_coming else None))

    def _snapshot(
        self,
        request: Routable,
        prefixes: Prefixes,
        workers: Workers,
        now_s: float,
        passes_s: Mapping[WorkerId, float],
    ) -> Snapshot:
        def queue_s(worker: Worker) -> float:
            ahead_s = self._reservations.seconds_on(worker.worker_id) - passes_s.get(worker.worker_id, 0.0)
            return worker.queue_s(now_s) + max(0.0, ahead_s)

        attempt, routing, shape = request.attempt, request.routing, workers.shape
        most_tokens, known = attempt.most_new_tokens, attempt.known_tokens
        need = Need(tokens=known, block_size=shape.block_size, held=prefixes.held, queue_s=queue_s)

        def views(role: Sequence[Worker], candidates: Candidates) -> tuple[WorkerView, ...]:
            seen = candidates.among(role, workers.by_id, need) if self._narrows and len(role) > WHOLE else role
            return tuple(view(worker) for worker in seen)

        def view(worker: Worker) -> WorkerView:
            passed_s = passes_s.get(worker.worker_id, 0.0)
            setup_s = self._setups.seconds(worker, attempt.request, routing.compile_s)
            return self._view(worker, prefixes, passed_s, now_s, setup_s)

        hashes = attempt.block_hashes
        return Snapshot(
            known_tokens=known,
            full_blocks=len(hashes),
            block_size=shape.block_size,
            page_bytes=shape.page_bytes,
            end_pages=_end_pages(shape, len(hashes)) if shape.tail_blocks else 0.0,
            decode=views(workers.decode, self._decode),
            prefill=views(_sources(request, workers), self._prefill),
            prefill_utilisation=self._prefill_utilisation(workers.prefill) if self._narrows else None,
            block_hashes=hashes,
            output_tokens=min(most_tokens, round(self.output_tokens) or most_tokens),
            re_reference_rate=self._index.re_reference.rate,
            residual_s=(self._residuals[0].seconds(now_s), self._residuals[1].seconds(now_s)),
            turn=self._turn,
            draw=self._draws.random(),
            mask_s=routing.mask_s,
            cache_key=routing.cache_key,
        )

    def _prefill_utilisation(self, workers: Sequence[Worker]) -> float:
        """Returns the mean reported utilisation of all of them."""
        if len(workers) > WHOLE:
            return self._prefill.utilisation
        return sum([worker.utilisation for worker in workers]) / max(1, len(workers))

    def ended(self, output_tokens: int) -> None:
        """Notes the length of an output that has ended. The next outputs are expected to be like it."""
        weight = OUTPUT_MEMORY if self.output_tokens else 1.0
        self.output_tokens += weight * (output_tokens - self.output_tokens)

    def streamed(self, token_s: float) -> None:
        """Notes the seconds per token of an output, complete or not."""
        weight = TOKEN_MEMORY if self.token_s else 1.0
        self.token_s += weight * (token_s - self.token_s)

    def had_first_token(self, decision: Decision, seconds: float, now_s: float) -> None:
        """Notes the seconds from a request's latest decision to its first token."""
        residual_s = seconds - decision.forecast.foreseen_s
        self._residuals[decision.source is None].observe(residual_s, now_s)

    def _view(
        self, worker: Worker, prefixes: Prefixes, passed_s: float, now_s: float, setup_s: tuple[float, float]
    ) -> WorkerView:
        load, worker_id = worker.load, worker.worker_id
        reserved = self._reservations.on(worker_id)
        ahead_s = max(0.0, reserved.seconds - passed_s)
        streams_ahead = reserved.streams * ahead_s / reserved.seconds if reserved.seconds else reserved.streams
        return WorkerView(
            worker=worker_id,
            queue_s=worker.queue_s(now_s) + ahead_s + setup_s[0],
            queued_tokens=load.queued_tokens + reserved.tokens,
            requests=load.running + load.waiting + self._reservations.requests_on(worker_id),
            running=load.running + reserved.streams,
            waiting=load.waiting,
            slots=load.slots,
            slots_taken=load.running + load.waiting + streams_ahead,
            pages_free=max(0, load.pages_free - reserved.pages),
            pages_cached=max(0, load.pages_cached - max(0, reserved.pages - load.pages_free)),
            pages_active=load.pages_active + reserved.pages,
            cost=worker.cost,
            step_tokens_each=worker.step_tokens_each,
            step_tokens=load.costs.step_tokens,
            step_target_s=load.costs.step_target_s,
            depths=_depths(prefixes.held.get(worker_id, ()), len(worker.tier_page_s)),
            resident=_depths(prefixes.resident.get(worker_id, ()), len(worker.tier_page_s)),
            page_blocks=None if prefixes.pages is None else prefixes.pages.get(worker_id, (0,))[0],
            tier_page_s=worker.tier_page_s,
            kv_form=worker.kv_form,
            page_bytes=worker.page_bytes,
            conversion_page_s=load.conversion_page_s,
            links=worker.links,
            fetch_wait_s=max(0.0, self._fetching_until_s.get(worker_id, 0.0) - now_s),
            serve_wait_s=max(0.0, self._serving_until_s.get(worker_id, 0.0) - now_s),
            load_wait_s=max(0.0, self._loading_until_s.get(worker_id, 0.0) - now_s),
            utilisation=worker.utilisation,
            compile_s=setup_s[1],
        )

    def _with_source_of_coming_blocks(self, snapshot: Snapshot, prefixes: Prefixes, decision: Decision) -> Decision:
        """Adds a page source to the decision if all blocks are on their way to the decode worker.

        It is the source that computes them. If the pull that brings them fails, this request can pull them itself.
        """
        hashes = snapshot.block_hashes
        if decision.source is not None or decision.peer is not None or not hashes:
            return decision
        if prefixes.resident.get(decision.decode, (0,))[-1] == len(hashes):
            return decision
        if next(view for view in snapshot.decode if view.worker == decision.decode).cached_blocks < len(hashes):
            return decision
        sources = {view.worker for view in snapshot.prefill}
        coming_from = next((w for w in self._reservations.coming(hashes[-1]) if w in sources), None)
        return dataclasses.replace(decision, source=coming_from)


def _useful_hashes(request: Routable) -> tuple[BlockHash, ...]:
    """Returns the hashes of blocks that the request can reuse: none if its prompt is scored."""
    return () if request.attempt.scores_prompt else request.attempt.block_hashes


def _sources(request: Routable, workers: Workers) -> Sequence[Worker]:
    """Returns the prefill workers whose pages the request may have."""
    if request.attempt.scores_prompt:
        return ()
    if request.routing.takes_converted:
        return workers.prefill
    formats = {worker.kv_form.format for worker in workers.decode}
    return [worker for worker in workers.prefill if {worker.kv_form.format} == formats]


def _extend(until_s: dict[WorkerId, float], worker: WorkerId, seconds: float, now_s: float, workers: int) -> None:
    """Adds seconds of work to the time until which a worker's link or reader is busy."""
    until_s[worker] = max(until_s.get(worker, 0.0), now_s) + seconds
    if len(until_s) > 2 * workers:  # some are of workers that are gone
        for idle in [each for each, at_s in until_s.items() if at_s < now_s]:
            del until_s[idle]


def _end_pages(shape: Shape, blocks: int) -> float:
    """Returns the size of the further pages at the end of a prompt, in pages of the first group."""
    return min(shape.tail_blocks, blocks) * shape.further_page_bytes / shape.page_bytes


def _depths(held: tuple[int, ...], tiers: int) -> tuple[int, ...]:
    """Returns one depth for each tier with a reported load time. Blocks on other tiers are left out."""
    known = held[:tiers] or (0,)
    return (*known, *[known[-1]] * (tiers - len(known)))


def _pull_page_s(workers: Workers, source_id: WorkerId, target_id: WorkerId) -> float:
    """Returns the seconds for which a page occupies both workers: its transfer, and its conversion if forms differ."""
    source, target = workers.by_id.get(source_id), workers.by_id.get(target_id)
    known = NO_LINKS if target is None else target.links
    usual = (link for worker in workers.by_id.values() for link in worker.links.values())
    link = known.get(source_id) or next(usual, UNKNOWN_LINK)
    usual_bytes = workers.shape.page_bytes
    if source is None or target is None:
        page_bytes = None if target is None else target.page_bytes
        return (usual_bytes if page_bytes is None else page_bytes) / link.bytes_per_s
    return page_s(source, target, usual_bytes, link.bytes_per_s)


def _shares(snapshot: Snapshot, decision: Decision) -> dict[WorkerId, ReservedShare]:
    """Returns what the decision puts on each worker: tokens to compute, their predicted seconds, pages to claim."""
    decode = next(view for view in snapshot.decode if view.worker == decision.decode)
    pages = snapshot.new_pages(decode) + 1
    forecast = decision.forecast
    if decision.source is None:
        return {decision.decode: ReservedShare(max(1, forecast.computed_tokens), forecast.prefill_s, pages, 1)}
    tail = snapshot.known_tokens - snapshot.full_blocks * snapshot.block_size
    source = next(view for view in snapshot.prefill if view.worker == decision.source)
    return {
        decision.decode: ReservedShare(max(1, tail), forecast.tail_s, pages, 1),
        decision.source: ReservedShare(forecast.computed_tokens, forecast.prefill_s, snapshot.new_pages(source), 0),
    }
