"""Looks, lets the policy choose, and reserves what was chosen before anyone else looks.

The live router and the simulator use this one class: it has no clock and no socket, and its members are whatever
reports loads.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from router.fleet.worker import LinkRate, Member
from router.routing.forecast import UNKNOWN_LINK
from router.routing.policy import NO_LINKS, Decision, Policy, Snapshot, WorkerView
from router.routing.prefix_index import PrefixIndex
from router.routing.reservations import Reservations, Share
from twostroke.ids import BlockName, RequestId, WorkerId
from twostroke.kv_cache.tier import Tier

ANSWER_MEMORY = 0.02
"""Weight of the latest answer in the expected length of the next one: the last hundred count."""
FLOW_MEMORY = 0.1
"""In the expected time between two tokens: that changes as soon as load does."""

NOTHING_PASSED: Mapping[WorkerId, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One answer that wants to be placed."""

    request_id: RequestId
    known_tokens: int
    """Of prompt and answer so far."""
    names: tuple[BlockName, ...]
    """Of their full blocks."""
    most_answer_tokens: int
    passes_s: Mapping[WorkerId, float] = field(default_factory=lambda: NOTHING_PASSED)
    """Of what is reserved on workers, the seconds that this one goes before."""
    is_tentative: bool = False
    """It waits for its turn: `dispatched` is called when it goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of the pages that the whole fleet shares."""

    block_size: int
    page_bytes: int


class Selector:
    def __init__(self, policy: Policy, index: PrefixIndex, reservations: Reservations, *, seed: int | None) -> None:
        self._policy = policy
        self._index = index
        self._reservations = reservations
        self._draws = random.Random(seed)
        self._turn = 0
        self._answer_tokens = 0.0
        self._token_s = 0.0
        self._unforeseen = Unforeseen()
        self._fetching_until_s: dict[WorkerId, float] = {}
        self._serving_until_s: dict[WorkerId, float] = {}
        """When prefixes that were sent for will have come, or gone: pulls of one worker share its wire."""

    def select(
        self, ask: Ask, shape: Shape, decode: Sequence[Member], prefill: Sequence[Member], now_s: float
    ) -> Decision:
        """Where the answer goes; reserved under its request id until `Reservations` is told that it has ended."""
        snapshot = self.look(ask, shape, decode, prefill, now_s)
        held = max(view.cached_blocks for view in (*snapshot.decode, *snapshot.prefill))
        self._index.regret.asked(ask.names[held:])
        decision = self._with_source_of_coming_blocks(snapshot, self._policy(snapshot))
        self._turn += 1
        self._reservations.place(ask.request_id, _shares(snapshot, decision), ask.names)
        if not ask.is_tentative:
            self.dispatched(decision, shape, [*prefill, *decode], now_s)
        return decision

    def dispatched(self, decision: Decision, shape: Shape, members: Sequence[Member], now_s: float) -> None:
        """It is carried out now: what it pulls takes its turn on both ends of the wire."""
        forecast, computer = decision.forecast, decision.source or decision.decode
        links = {member.worker: member.links for member in members}
        pulls = [(decision.peer, computer, forecast.fetched_blocks)]
        pulls.append((decision.source, decision.decode, forecast.pulled_blocks))
        for giver, taker, pages in pulls:
            if giver is None or not pages:
                continue
            link = links.get(taker, NO_LINKS).get(giver) or _usual_link(members)
            seconds = pages * shape.page_bytes / link.bytes_per_s
            for clock, worker in ((self._fetching_until_s, taker), (self._serving_until_s, giver)):
                clock[worker] = max(clock.get(worker, 0.0), now_s) + seconds
                if len(clock) > 2 * len(links):  # some are of workers that are no longer here
                    for idle in [worker for worker, until_s in clock.items() if until_s < now_s]:
                        del clock[idle]

    def look(
        self, ask: Ask, shape: Shape, decode: Sequence[Member], prefill: Sequence[Member], now_s: float
    ) -> Snapshot:
        """What the policy would see."""
        resident = held = self._index.leading_blocks(ask.names)
        if ask.names and any(True for _ in self._reservations.coming(ask.names[0])):
            held = self._index.leading_blocks(ask.names, self._reservations.coming)

        def view(member: Member) -> WorkerView:
            here, worker = resident.get(member.worker, ()), member.worker
            return self._view(member, held.get(worker, ()), _in_memory(here), ask, now_s)

        return Snapshot(
            known_tokens=ask.known_tokens,
            full_blocks=len(ask.names),
            block_size=shape.block_size,
            page_bytes=shape.page_bytes,
            decode=tuple(map(view, decode)),
            prefill=tuple(map(view, prefill)),
            names=ask.names,
            answer_tokens=min(ask.most_answer_tokens, round(self._answer_tokens) or ask.most_answer_tokens),
            eviction_regret=self._index.regret.share,
            unforeseen_s=(
                self._unforeseen.seconds(now_s, is_local=False),
                self._unforeseen.seconds(now_s, is_local=True),
            ),
            turn=self._turn,
            draw=self._draws.random(),
        )

    def answered(self, tokens: int) -> None:
        """An answer of this length has ended: the next ones are expected to be like it."""
        weight = ANSWER_MEMORY if self._answer_tokens else 1.0
        self._answer_tokens += weight * (tokens - self._answer_tokens)

    def flowed(self, token_s: float) -> None:
        """An answer, whole or not, has come at one token in this time."""
        weight = FLOW_MEMORY if self._token_s else 1.0
        self._token_s += weight * (token_s - self._token_s)

    def had_first_token(self, decision: Decision, seconds: float, now_s: float) -> None:
        """Of an answer that the first worker it was given to has begun, since the decision."""
        beyond_s = seconds - decision.forecast.foreseen_s
        self._unforeseen.observe(beyond_s, now_s, is_local=decision.source is None)

    @property
    def answer_tokens(self) -> float:
        """Expected of the next answer; 0 while nothing is known."""
        return self._answer_tokens

    @property
    def token_s(self) -> float:
        """Expected from one token of an answer to the next, with all that comes between; 0 while nothing is known."""
        return self._token_s

    def _view(self, member: Member, held: tuple[int, ...], resident: int, ask: Ask, now_s: float) -> WorkerView:
        load, worker = member.load, member.worker
        reserved = self._reservations.on(worker)
        ahead_s = max(0.0, reserved.seconds - ask.passes_s.get(worker, 0.0))
        streams_ahead = reserved.streams * ahead_s / reserved.seconds if reserved.seconds else reserved.streams
        return WorkerView(
            worker=worker,
            queue_s=member.queue_s(now_s) + ahead_s,
            queued_tokens=load.queued_tokens + reserved.tokens,
            requests=load.running + load.waiting + self._reservations.requests_on(worker),
            running=load.running + reserved.streams,
            waiting=load.waiting,
            seats=load.seats,
            seats_taken=load.running + load.waiting + streams_ahead,
            pages_free=max(0, load.pages_free - reserved.pages),
            pages_cached=max(0, load.pages_cached - max(0, reserved.pages - load.pages_free)),
            pages_active=load.pages_active + reserved.pages,
            cost=member.cost,
            step_tokens=load.costs.step_tokens,
            step_target_s=load.costs.step_target_s,
            depths=_depths(held, len(member.tier_page_s)),
            resident_blocks=resident,
            tier_page_s=member.tier_page_s,
            links=member.links,
            fetch_wait_s=max(0.0, self._fetching_until_s.get(worker, 0.0) - now_s),
            serve_wait_s=max(0.0, self._serving_until_s.get(worker, 0.0) - now_s),
            utilisation=member.utilisation,
        )

    def _with_source_of_coming_blocks(self, snapshot: Snapshot, decision: Decision) -> Decision:
        """Where the decode worker needs nothing because all of it is on its way, name the one it comes from: should
        that pull die, this request's can go on there."""
        names = snapshot.names
        if decision.source is not None or decision.peer is not None or not names:
            return decision
        if self._index.leading_blocks(names).get(decision.decode, (0,))[-1] == len(names):
            return decision
        if next(view for view in snapshot.decode if view.worker == decision.decode).cached_blocks < len(names):
            return decision
        sources = {view.worker for view in snapshot.prefill}
        coming_from = next((w for w in self._reservations.coming(names[-1]) if w in sources), None)
        return dataclasses.replace(decision, source=coming_from)


def _depths(held: tuple[int, ...], tiers: int) -> tuple[int, ...]:
    """One for each tier whose load time the worker reports: blocks on tiers below cannot be priced."""
    known = held[:tiers] or (0,)
    return (*known, *[known[-1]] * (tiers - len(known)))


def _in_memory(depths: tuple[int, ...]) -> int:
    """Blocks on the device or in host memory: pages on disk are not fetched by others."""
    return depths[min(Tier.HOST, len(depths) - 1)] if depths else 0


def _usual_link(members: Sequence[Member]) -> LinkRate:
    return next((link for member in members for link in member.links.values()), UNKNOWN_LINK)


def _shares(snapshot: Snapshot, decision: Decision) -> dict[WorkerId, Share]:
    """What the decision puts on whom: tokens to compute, predicted seconds of that, pages to claim."""
    decode = next(view for view in snapshot.decode if view.worker == decision.decode)
    missing = max(0, snapshot.full_blocks - decode.cached_blocks)
    forecast = decision.forecast
    if decision.source is None:
        return {decision.decode: Share(max(1, forecast.computed_tokens), forecast.prefill_s, missing + 1, 1)}
    tail = snapshot.known_tokens - snapshot.full_blocks * snapshot.block_size
    source = next(view for view in snapshot.prefill if view.worker == decision.source)
    pages = max(0, snapshot.full_blocks - source.cached_blocks)
    return {
        decision.decode: Share(max(1, tail), forecast.tail_s, missing + 1, 1),
        decision.source: Share(forecast.computed_tokens, forecast.prefill_s, pages, 0),
    }


MEMORY = 63
"""Answers that count: enough for a steady median, few enough to follow a change within a minute of traffic."""
LEAST = 8
"""Fewer say nothing: the first answers of a fleet meet everything for the first time."""
FRESH_S = 60.0
"""Older ones do not count. Whoever is refused for what was learned in a bad minute brings no news of a better one."""


class Unforeseen:
    """A median, of answers whose prompt the decode worker computed and of the others: a request that met something odd
    moves it by one place."""

    def __init__(self) -> None:
        self._seen: dict[bool, deque[tuple[float, float]]] = {local: deque(maxlen=MEMORY) for local in (False, True)}
        """When, and how much."""
        self._median_s = {False: 0.0, True: 0.0}

    def seconds(self, now_s: float, *, is_local: bool) -> float:
        seen = self._seen[is_local]
        if seen and seen[0][0] + FRESH_S < now_s:
            while seen and seen[0][0] + FRESH_S < now_s:
                seen.popleft()
            self._settle(is_local)
        return self._median_s[is_local]

    def observe(self, seconds: float, now_s: float, *, is_local: bool) -> None:
        """An answer's first token came this much later than was foreseen."""
        self._seen[is_local].append((now_s, seconds))
        self._settle(is_local)

    def _settle(self, is_local: bool) -> None:
        seen = self._seen[is_local]
        enough = len(seen) >= LEAST
        self._median_s[is_local] = max(0.0, statistics.median(seconds for _, seconds in seen)) if enough else 0.0
