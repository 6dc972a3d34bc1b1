"""Decides how many workers of each role there should be now.

It reads no clock: observations carry their time.

`scaling.capacity` says what a load needs. Its inputs are the rate and the requests of the last seconds, and the costs
that workers have measured.

- Workers are added when they were needed for `up_s` without a break.
- Workers are removed when fewer would have been enough for `down_s`, even with a quarter more requests.
- A worker that its role can spare switches to the other role as soon as that role lacks one.

Between the two thresholds nothing changes, so a load near one of them neither starts nor stops workers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from cluster.scaling.capacity import (
    POISSON_SLACK,
    ExpectedLoad,
    MeasuredCapacity,
    RequestDemand,
    attainment_of,
    first_tokens_alone_s,
    mean_context_tokens,
    prefill_seconds,
    prefill_workers_busy,
    streams_per_worker,
)
from cluster.values.worker_counts import LatencyTargets, WorkerCounts
from twostroke.config import Bounds, ScalingConfig

REMEMBERED = 96
"""Requests remembered: enough for the spread of their lengths, few enough to follow a change of the load."""
LEAST_ENDED_REQUESTS = 8
"""Requests that must have ended before anything is decided."""
NOTHING = RequestDemand(0, 0, 0)
"""Demand that stands for a load without requests."""
SPARE = 1.25
"""Before workers are removed, the others must be enough for the load times this factor."""
TARGET_UTILISATION = 0.75
"""Target utilisation of prefill workers, if no target for the first token is set, or none can be met."""
SILENCE_S = 10.0
"""Longest gap between observations; after a longer one the earlier ones are dropped."""
CLEAR_S = 20.0
"""Seconds within which a queue must be worked off."""
PATIENCE = 3.0
"""Multiple of `down_s` for which no worker is removed while another of its role starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetObservation:
    """The fleet at one moment."""

    at_s: float
    arrived: int
    """Requests that have arrived since counting began."""
    ended: tuple[RequestDemand, ...] = ()
    """Requests that ended since the last observation; only a sample if there were many."""
    capacity: MeasuredCapacity | None = None
    """None means that no worker has measured its steps yet."""
    slots: int = 1
    """Streams that one decode worker can hold."""
    backlog_s: float = 0.0
    """Seconds of queued computing, summed over all prefill workers."""
    decode_waiting: int = 0
    """Requests that wait for pages or a slot of a decode worker."""
    streams: int = 0
    """Streams that run, over all decode workers."""
    stream_tokens: int = 0
    """Tokens that those streams hold."""
    serving: WorkerCounts
    desired: WorkerCounts
    """Workers that should be there, including those that still start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerNeeds:
    """The worker counts that the formulas call for at one moment."""

    at_s: float
    now: WorkerCounts
    with_spare: WorkerCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingDecision:
    """A decision, and the numbers behind it."""

    wanted: WorkerCounts
    need: WorkerCounts | None = None
    """Workers needed by formula; None while too little is known."""
    requests_per_s: float = 0.0
    prefill_busy: float = 0.0
    """Prefill workers that the load alone, without the queue, keeps busy without a pause."""
    streams: float | None = 0.0
    """Streams on each wanted decode worker in equilibrium; None where they would grow for ever."""
    why: str

    def __str__(self) -> str:
        if self.need is None:
            return self.why
        streams = "unboundedly many" if self.streams is None else f"{self.streams:.1f}"
        return (
            f"{self.wanted}: {self.why} ({self.requests_per_s:.2f} requests/s keep {self.prefill_busy:.2f} prefill "
            f"workers busy and {streams} streams on each decode worker; needs {self.need})"
        )


class Planner:
    """Decides from the observations that it was given."""

    def __init__(
        self, targets: LatencyTargets, prefill: Bounds, decode: Bounds, config: ScalingConfig, *, may_switch: bool
    ) -> None:
        self._targets = targets
        self._prefill, self._decode = prefill, decode
        self._config = config
        self._may_switch = may_switch
        self._arrivals: deque[tuple[float, int]] = deque()
        self._demands: deque[RequestDemand] = deque(maxlen=REMEMBERED)
        self._needs: deque[WorkerNeeds] = deque()
        self._complete_s = [-math.inf, -math.inf]
        """When all desired workers of each role last served: prefill, then decode."""

    def decide(self, seen: FleetObservation) -> ScalingDecision:
        self._remember(seen)
        rate = self._rate()
        if rate is None or seen.capacity is None or (rate and len(self._demands) < LEAST_ENDED_REQUESTS):
            return ScalingDecision(wanted=self._within(seen.desired), why="too little is known of the load yet")
        load = ExpectedLoad(requests_per_s=rate, demands=tuple(self._demands) if rate else (NOTHING,))
        needs = self._needs_of(load, seen.capacity, seen)
        self._needs.append(needs)
        wanted, why = self._wanted(seen, needs)
        streams = streams_per_worker(max(1, wanted.decode), load, seen.capacity)
        return ScalingDecision(
            wanted=wanted,
            need=needs.now,
            requests_per_s=rate,
            prefill_busy=prefill_workers_busy(load, seen.capacity),
            streams=streams,
            why=why,
        )

    def _remember(self, seen: FleetObservation) -> None:
        self._demands.extend(seen.ended)
        if self._arrivals:
            at_s, arrived = self._arrivals[-1]
            if seen.arrived < arrived or seen.at_s - at_s > SILENCE_S:
                self._arrivals.clear()  # counting began anew, or arrivals were missed
        if self._needs and seen.at_s - self._needs[-1].at_s > SILENCE_S:
            self._needs.clear()  # the time between is not known
        self._arrivals.append((seen.at_s, seen.arrived))
        while len(self._arrivals) > 2 and self._arrivals[1][0] <= seen.at_s - self._config.average_s:
            self._arrivals.popleft()
        for role, (serving, desired) in enumerate(zip(seen.serving.pair, seen.desired.pair, strict=True)):
            if serving >= desired:
                self._complete_s[role] = seen.at_s
        longest_s = max(self._config.down_s, 2 * self._config.up_s)
        while len(self._needs) > 1 and self._needs[1].at_s <= seen.at_s - longest_s:
            self._needs.popleft()

    def _rate(self) -> float | None:
        (first_s, first), (last_s, last) = self._arrivals[0], self._arrivals[-1]
        span_s = last_s - first_s
        return (last - first) / span_s if span_s >= self._config.average_s / 2 else None

    def _needs_of(self, load: ExpectedLoad, capacity: MeasuredCapacity, seen: FleetObservation) -> WorkerNeeds:
        spare = replace(load, requests_per_s=load.requests_per_s * SPARE)
        # Work that waits for workers that are already starting needs no further ones.
        backlog_s = seen.backlog_s if seen.serving.prefill >= seen.desired.prefill else 0.0
        waits = seen.decode_waiting > 0 and seen.serving.decode >= seen.desired.decode
        return WorkerNeeds(
            at_s=seen.at_s,
            now=self._within(
                WorkerCounts(
                    self._prefill_need(load, capacity, backlog_s),
                    max(self._decode_need(load, capacity, seen), seen.desired.decode + 1 if waits else 0),
                )
            ),
            with_spare=self._within(
                WorkerCounts(
                    self._prefill_need(spare, capacity, backlog_s),
                    max(self._decode_need(spare, capacity, seen, SPARE), seen.desired.decode + 1 if waits else 0),
                )
            ),
        )

    def _prefill_need(self, load: ExpectedLoad, capacity: MeasuredCapacity, backlog_s: float) -> int:
        mean_s = _mean(prefill_seconds(load, capacity))
        if not mean_s:
            return self._prefill.clamp(math.ceil(backlog_s / CLEAR_S))
        with_queue = replace(load, requests_per_s=load.requests_per_s + backlog_s / CLEAR_S / mean_s)
        share, busy = self._possible_share(load, capacity), prefill_workers_busy(with_queue, capacity)
        for count in range(max(1, self._prefill.least, math.ceil(busy)), self._prefill.most + 1):
            if self._targets.ttft_s is None or not share:
                if busy <= count * TARGET_UTILISATION:
                    return count
            elif attainment_of(count, with_queue, capacity, self._targets.ttft_s) >= share:
                return count
        return self._prefill.most

    def _possible_share(self, load: ExpectedLoad, capacity: MeasuredCapacity) -> float:
        """Returns the share of first tokens to aim for. It is the target where an empty fleet exceeds it, else half of
        what that achieves. It is 0 without a target, and where no request can meet it.
        """
        if self._targets.ttft_s is None:
            return 0.0
        alone_s = first_tokens_alone_s(load, capacity)
        most = sum(each <= self._targets.ttft_s for each in alone_s) / len(alone_s)
        return self._targets.attainment if most > self._targets.attainment else most / 2

    def _decode_need(
        self, load: ExpectedLoad, capacity: MeasuredCapacity, seen: FleetObservation, spare: float = 1.0
    ) -> int:
        """Returns the decode workers needed for the load and for the streams that run now."""
        context = mean_context_tokens(load)
        for count in range(self._decode.least, self._decode.most + 1):
            streams = streams_per_worker(count, load, capacity)
            if streams is None:
                continue
            busy = streams + POISSON_SLACK * math.sqrt(streams)
            running = math.ceil(seen.streams * spare / count)
            if (
                max(busy, running) <= seen.slots
                and self._can_serve(capacity, busy, busy * context)
                and self._can_serve(capacity, running, seen.stream_tokens * spare / count)
            ):
                return count
        return self._decode.most

    def _can_serve(self, capacity: MeasuredCapacity, streams: float, tokens: float) -> bool:
        """Returns whether one decode worker holds these tokens and meets the inter-token target. A target that one
        stream alone misses counts as met.
        """
        itl_s, cost = self._targets.itl_s, capacity.cost
        is_fast = (
            itl_s is None or cost.of_streams(1, 0) > itl_s or cost.of_streams(math.ceil(streams), int(tokens)) <= itl_s
        )
        return tokens <= capacity.decode_pool_tokens and is_fast

    def _wanted(self, seen: FleetObservation, needs: WorkerNeeds) -> tuple[WorkerCounts, str]:
        desired = seen.desired
        more = WorkerCounts(*(max(*pair) for pair in zip(desired.pair, self._lasting(seen.at_s).pair, strict=True)))
        fewer = self._fewer(seen)
        lacks = (more.prefill > desired.prefill, more.decode > desired.decode)
        if any(lacks):
            wanted = self._switched(seen, more) if self._may_switch else more
            what = " and ".join(name for name, is_so in zip(("prefill", "decode"), lacks, strict=True) if is_so)
            return self._within(wanted), f"more {what} workers have been needed for {self._config.up_s:g} s"
        if fewer is not None and (fewer.prefill < desired.prefill or fewer.decode < desired.decode):
            wanted = WorkerCounts(*(min(*pair) for pair in zip(desired.pair, fewer.pair, strict=True)))
            load = f"even with {SPARE - 1:.0%} more load"
            return self._within(wanted), f"fewer would have been enough for {self._config.down_s:g} s, {load}"
        return self._within(desired), "enough"

    def _fewer(self, seen: FleetObservation) -> WorkerCounts | None:
        fewer = self._peak(seen.at_s, self._config.down_s)
        if fewer is None:
            return None
        patience_s = PATIENCE * self._config.down_s
        is_starting = [0 < seen.at_s - complete_s < patience_s for complete_s in self._complete_s]
        desired = seen.desired.pair
        return WorkerCounts(
            *(have if keeps else n for have, keeps, n in zip(desired, is_starting, fewer.pair, strict=True))
        )

    def _lasting(self, now_s: float) -> WorkerCounts:
        """Returns what was needed at every moment since `up_s` ago; zero if that is not known."""
        since_s = now_s - self._config.up_s
        if self._needs[0].at_s > since_s:
            return WorkerCounts(0, 0)
        recent = [needs.now for needs in self._since(since_s)]
        return WorkerCounts(min(each.prefill for each in recent), min(each.decode for each in recent))

    def _peak(self, now_s: float, span_s: float) -> WorkerCounts | None:
        """Returns what would have been enough at every moment, with some spare; None where that is not known."""
        since_s = now_s - span_s
        if self._needs[0].at_s > since_s:
            return None
        recent = [needs.with_spare for needs in self._since(since_s)]
        return WorkerCounts(max(each.prefill for each in recent), max(each.decode for each in recent))

    def _switched(self, seen: FleetObservation, more: WorkerCounts) -> WorkerCounts:
        """Covers what one role lacks with workers that the other has not needed for a while."""
        enough = self._peak(seen.at_s, max(2 * self._config.up_s, self._config.down_s / 3))
        if enough is None:
            return more
        desired = seen.desired
        if more.prefill > desired.prefill and more.decode == desired.decode:
            spare = min(more.prefill - desired.prefill, max(0, desired.decode - max(enough.decode, self._decode.least)))
            return WorkerCounts(more.prefill, desired.decode - spare)
        if more.decode > desired.decode and more.prefill == desired.prefill:
            spare = min(
                more.decode - desired.decode, max(0, desired.prefill - max(enough.prefill, self._prefill.least))
            )
            return WorkerCounts(desired.prefill - spare, more.decode)
        return more

    def _since(self, since_s: float) -> Iterator[WorkerNeeds]:
        return (needs for needs in self._needs if needs.at_s >= since_s)

    def _within(self, counts: WorkerCounts) -> WorkerCounts:
        return WorkerCounts(self._prefill.clamp(counts.prefill), self._decode.clamp(counts.decode))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
