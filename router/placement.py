"""Puts one attempt at an answer onto a decode worker: look, choose, open; wait where nobody can take it now."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from router.answer_stream import AnswerStream
from router.fleet import Fleet
from router.link_pool import LinkPool
from router.member import Member
from router.metrics import RouterMetrics
from router.policies import policy_named
from router.policy import Decision, Snapshot, WorkerView
from router.reservations import Share
from router.worker_link import WorkerLink
from twostroke.config import Role, RouterConfig
from twostroke.errors import Draining, FingerprintMismatch, Overloaded, PeerLost, ServeError, StaleEpoch
from twostroke.ids import WorkerId
from twostroke.lifetime import Instant, Lifetime
from twostroke.request import Request
from twostroke.rpc.convert import request_to_message
from twostroke.rpc.v1 import worker_pb2

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.5
"""A worker that could not be reached may be back without the fleet having noticed anything."""


@dataclass(frozen=True, slots=True)
class Placed:
    """An attempt that a decode worker has accepted."""

    link: WorkerLink
    stream: AnswerStream
    decision: Decision


@dataclass(frozen=True, slots=True)
class _Refusal:
    worker: WorkerId
    error: ServeError


class Placer:
    """Shared by all requests; owns the turn and the draws that policies are given."""

    def __init__(self, config: RouterConfig, fleet: Fleet, links: LinkPool, metrics: RouterMetrics) -> None:
        self._policy = policy_named(config.policy)
        self._policy_name = config.policy
        self._worker_wait_s = config.worker_wait_s
        self._draws = random.Random(config.seed)
        self._turn = 0
        self._openings = itertools.count()
        """Numbers attempts over all requests: where a client uses an id again, a late Close or token of the earlier
        request is not mistaken for the new one's."""
        self._fleet = fleet
        self._links = links
        self._metrics = metrics

    async def place(self, request: Request, lifetime: Lifetime) -> Placed:
        """Returns once a worker has it; every worker asked counts as an attempt and gets its own number.

        Raises Overloaded where every worker that could be asked is full, Draining where all of them are leaving,
        PeerLost where none came in time, and what a worker says about the request itself.
        """
        give_up_s = time.monotonic() + self._worker_wait_s
        full: set[WorkerId] = set()
        unusable: set[WorkerId] = set()
        while True:
            serving = [m for m in self._fleet.serving(Role.DECODE) if m.worker not in unusable]
            free = [m for m in serving if m.worker not in full]
            if serving and not free:
                raise Overloaded(f"all {len(serving)} decode workers that serve are full; try again later")
            if not free and self._fleet.is_leaving:
                raise Draining("every decode worker drains and takes no new requests; try again later")
            if not free:
                await self._wait(give_up_s)
                unusable.clear()
                continue
            attempt = dataclasses.replace(request, attempt=next(self._openings))
            placed = await self._open(attempt, free, lifetime)
            if isinstance(placed, Placed):
                return placed
            (full if isinstance(placed.error, Overloaded) else unusable).add(placed.worker)

    async def _wait(self, give_up_s: float) -> None:
        left_s = give_up_s - time.monotonic()
        if left_s <= 0:
            raise PeerLost(f"no decode worker could take the request within {self._worker_wait_s} s; try again later")
        await self._fleet.wait_for_change(min(left_s, LOOK_AGAIN_S))

    async def _open(self, request: Request, free: Sequence[Member], lifetime: Lifetime) -> Placed | _Refusal:
        decision = self._decide(request, free)
        lifetime.mark(Instant.ROUTED)
        decode = next(member for member in free if member.worker == decision.decode)
        link, stream = self._links.to(decode), AnswerStream(request.request_id, request.attempt, len(request.emitted))
        is_open, may_be_open = False, True
        try:
            message = request_to_message(
                request,
                fingerprint=self._fleet.facts.fingerprint,
                worker_epoch=str(decode.epoch),
                source=self._source(decision),
            )
            await link.open(message, stream)
            is_open = True
        except ServeError as error:
            may_be_open = isinstance(error, PeerLost)
            log.warning(
                "open refused request=%s attempt=%d worker=%s error=%s: %s",
                request.request_id,
                request.attempt,
                decode.worker,
                type(error).__name__,
                error,
            )
            if may_go_elsewhere(error):
                return _Refusal(decode.worker, error)
            raise
        finally:
            if not is_open:
                self._fleet.reservations.end(request.request_id)
                link.forget(stream)
            if not is_open and may_be_open:
                self._links.close_later(link, stream)
        lifetime.mark(Instant.OPENED)
        self._fleet.reservations.opened(request.request_id, time.monotonic())
        return Placed(link, stream, decision)

    def _decide(self, request: Request, free: Sequence[Member]) -> Decision:
        """Look and choose; the choice is reserved before anyone else looks."""
        begun_s = time.perf_counter()
        snapshot = self._look(request, free)
        decision = self._with_source_of_coming_blocks(request, self._policy(snapshot))
        self._turn += 1
        shares = _shares(snapshot, decision)
        self._fleet.reservations.place(request.request_id, shares, request.names)
        self._metrics.decision_seconds.observe(time.perf_counter() - begun_s)
        self._metrics.count_decision(self._policy_name, "local" if decision.source is None else "prefill")
        log.info(
            "routed request=%s attempt=%d policy=%s decode=%s source=%s cached_tokens=%d %s",
            request.request_id,
            request.attempt,
            self._policy_name,
            decision.decode,
            decision.source or "local",
            decision.cached_tokens,
            decision.why,
        )
        return decision

    def _with_source_of_coming_blocks(self, request: Request, decision: Decision) -> Decision:
        """Where the decode worker needs nothing because all of it is on its way, name the one it comes from: should
        that pull die, this request's can go on there."""
        if decision.source is not None or not request.names:
            return decision
        if self._fleet.index.leading_blocks(request.names).get(decision.decode) == len(request.names):
            return decision
        sources = {member.worker for member in self._fleet.serving(Role.PREFILL)}
        coming_from = next((w for w in self._fleet.reservations.coming(request.names[-1]) if w in sources), None)
        return dataclasses.replace(decision, source=coming_from)

    def _look(self, request: Request, free: Sequence[Member]) -> Snapshot:
        held = self._fleet.index.leading_blocks(request.names, self._fleet.reservations.coming)
        facts = self._fleet.facts
        return Snapshot(
            known_tokens=len(request.prompt) + len(request.emitted),
            full_blocks=len(request.names),
            block_size=facts.block_size,
            page_bytes=facts.page_bytes,
            decode=tuple(self._view(member, held) for member in free),
            prefill=tuple(self._view(member, held) for member in self._fleet.serving(Role.PREFILL)),
            turn=self._turn,
            draw=self._draws.random(),
        )

    def _view(self, member: Member, held: dict[WorkerId, int]) -> WorkerView:
        load, reserved = member.load, self._fleet.reservations.on(member.worker)
        return WorkerView(
            worker=member.worker,
            queued_tokens=load.queued_tokens + reserved.tokens,
            running=load.running + reserved.streams,
            waiting=load.waiting,
            pages_free=max(0, load.pages_free - reserved.pages),
            pages_cached=max(0, load.pages_cached - max(0, reserved.pages - load.pages_free)),
            pages_active=load.pages_active + reserved.pages,
            seconds_per_token=load.seconds_per_token,
            seconds_per_step=load.seconds_per_step,
            cached_blocks=held.get(member.worker, 0),
            utilisation=member.utilisation,
        )

    def _source(self, decision: Decision) -> worker_pb2.PageSource | None:
        if decision.source is None:
            return None
        member = self._fleet.member(decision.source)
        assert member is not None, "chosen from the fleet's own members, without an await in between"
        return worker_pb2.PageSource(worker_id=member.worker, address=member.address, epoch=str(member.epoch))


def may_go_elsewhere(error: ServeError) -> bool:
    """It says something about the worker or the way to it, not about the request: another worker may take that."""
    return error.retryable or isinstance(error, StaleEpoch | FingerprintMismatch)


def _shares(snapshot: Snapshot, decision: Decision) -> dict[WorkerId, Share]:
    """What the decision puts on whom, in tokens to compute and pages to claim."""
    decode = next(view for view in snapshot.decode if view.worker == decision.decode)
    missing = max(0, snapshot.full_blocks - decode.cached_blocks)
    tail = snapshot.known_tokens - snapshot.full_blocks * snapshot.block_size
    if decision.source is None:
        return {decision.decode: Share(max(1, tail + missing * snapshot.block_size), missing + 1, 1)}
    computed = decision.source_tokens
    return {
        decision.decode: Share(max(1, tail), missing + 1, 1),
        decision.source: Share(computed, computed // snapshot.block_size, 0),
    }
