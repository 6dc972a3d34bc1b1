"""The planner in the supervisor: what routers report goes in, what it decides is done by the staff."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from cluster.plan import Resident, Stage
from cluster.planner import MOST_WORKERS, Ability, Counts, Demand
from cluster.scaling.planner import REMEMBERED, Outlook, Planner, Seen
from cluster.scaling.staff import Staff
from cluster.scaling.standing import Standing
from cluster.spec import FleetSpec
from twostroke.config import Role
from twostroke.errors import InvalidRequest
from twostroke.rpc.v1 import fleet_pb2
from twostroke.rpc.v1.control_pb2 import Load
from twostroke.schedule.cost import StepCost

log = logging.getLogger(__name__)

STALE_S = 5.0
"""A router that has reported nothing for so long is not counted on: it may be gone."""


@dataclass(slots=True)
class _Router:
    """What one has reported."""

    arrived: int
    """At its first report, and then all that were added to `Pilot._arrived`."""
    reported_at_s: float


class Pilot:
    def __init__(self, staff: Staff, spec: FleetSpec, clock: Callable[[], float] = time.monotonic) -> None:
        self._staff = staff
        self._spec = spec
        self._clock = clock
        self._planner = Planner(spec.promise, *spec.bounds, spec.scaling, may_switch=spec.flexible)
        self._routers: dict[str, _Router] = {}
        self._arrived = 0
        self._ended: deque[Demand] = deque(maxlen=REMEMBERED)
        self._loads: dict[str, tuple[Role, Load]] = {}
        self._block_size = 1
        self._outlook: Outlook | None = None
        self._has_news = False

    def report(self, said: fleet_pb2.ReportRequest) -> None:
        """Of one router. Counts begin with the first report that comes: what was before may have been counted."""
        now_s = self._clock()
        self._has_news = True
        known = self._routers.get(said.router_id)
        if known is not None:
            self._arrived += max(0, said.arrived - known.arrived)
        self._routers = {name: each for name, each in self._routers.items() if each.reported_at_s > now_s - STALE_S}
        self._routers[said.router_id] = _Router(said.arrived, now_s)
        self._ended += [
            Demand(each.prompt_tokens - each.cached_tokens, each.cached_tokens, each.output_tokens)
            for each in said.ended
            if each.cached_tokens <= each.prompt_tokens
        ]
        self._loads = {
            each.worker_id: (Role(each.server.role), each.load)
            for each in said.workers
            if each.server.role in (Role.PREFILL, Role.DECODE)
        }
        self._block_size = said.block_size or 1

    async def run(self, residents: Callable[[], list[Resident]]) -> None:
        """Look and decide for as long as the supervisor lives; only where somebody asked for it."""
        while self._spec.scales:
            await asyncio.sleep(self._spec.scaling.tick_s)
            try:
                self._look(residents())
            except Exception:
                log.exception("planner failed: counts stay as they are")

    def order(self, prefill: int | None, decode: int | None, *, is_automatic: bool) -> None:
        """Raises InvalidRequest for what no fleet can be."""
        if is_automatic:
            if not self._spec.scales:
                raise InvalidRequest(
                    "nothing is left to the planner here: start with --max-prefill or --max-decode above the counts",
                    field="--auto",
                )
            self._staff.set_automatic(is_automatic=True)
            return
        now = self._staff.wanted
        wanted = Counts(now.prefill if prefill is None else prefill, now.decode if decode is None else decode)
        if not (0 <= wanted.prefill <= MOST_WORKERS and 1 <= wanted.decode <= MOST_WORKERS):
            raise InvalidRequest(
                f"a fleet needs 0 or more prefill workers and 1 or more decode workers, of each {MOST_WORKERS} at "
                f"most, got {wanted}",
                field="--decode",
            )
        self._staff.scale(wanted, self._held(), is_automatic=False, reason=f"somebody asked for {wanted}")

    def standing(self, residents: Iterable[Resident]) -> Standing:
        wanted, serving = self._staff.wanted, _serving(residents)
        return Standing(
            wanted_prefill=wanted.prefill,
            wanted_decode=wanted.decode,
            serving_prefill=serving.prefill,
            serving_decode=serving.decode,
            is_automatic=self._staff.roster.is_automatic,
            reason=self._staff.roster.reason,
            outlook="" if self._outlook is None else str(self._outlook),
        )

    def _look(self, residents: list[Resident]) -> None:
        if not self._has_news:
            return  # nobody has said anything: that is no absence of load
        self._has_news = False
        outlook = self._outlook = self._planner.decide(self._seen(residents))
        wanted = self._staff.startable(outlook.wanted)
        if self._staff.roster.is_automatic and wanted != self._staff.wanted:
            self._staff.scale(wanted, self._held(), is_automatic=True, reason=str(outlook))

    def _seen(self, residents: Iterable[Resident]) -> Seen:
        ended = tuple(self._ended)
        self._ended.clear()
        return seen_from(
            self._loads,
            self._block_size,
            at_s=self._clock(),
            arrived=self._arrived,
            ended=ended,
            serving=_serving(residents),
            staff=self._staff.wanted,
        )

    def _held(self) -> dict[str, int]:
        """Blocks that each worker has."""
        return {name: load.pages_cached + load.pages_active for name, (_, load) in self._loads.items()}


def seen_from(
    loads: Mapping[str, tuple[Role, Load]],
    block_size: int,
    *,
    at_s: float,
    arrived: int,
    ended: tuple[Demand, ...],
    serving: Counts,
    staff: Counts,
) -> Seen:
    """What the planner is shown. A worker that has introduced itself, and not reported yet, has no seats."""
    decode = [load for role, load in loads.values() if role is Role.DECODE and load.seats]
    return Seen(
        at_s=at_s,
        arrived=arrived,
        ended=ended,
        ability=ability_from(loads, block_size),
        seats=min((load.seats for load in decode), default=1),
        backlog_s=sum(load.queued_s for role, load in loads.values() if role is Role.PREFILL),
        decode_waiting=sum(load.waiting for load in decode),
        streams=sum(load.running for load in decode),
        stream_tokens=sum(load.pages_active for load in decode) * block_size,
        serving=serving,
        staff=staff,
    )


def ability_from(loads: Mapping[str, tuple[Role, Load]], block_size: int) -> Ability | None:
    """As the workers have measured it: prompts where prefill workers do them, streams on decode workers."""
    decode = [load for role, load in loads.values() if role is Role.DECODE and load.costs.step_s]
    prefill = [load for role, load in loads.values() if role is Role.PREFILL and load.costs.prompt_token_s] or decode
    if not decode:
        return None
    links = [link for load in decode for link in load.links if link.bytes_per_s]

    def mean(of: list[Load], name: str) -> float:
        return sum(float(getattr(load.costs, name)) for load in of) / len(of)

    return Ability(
        cost=StepCost(
            step_s=mean(decode, "step_s"),
            stream_s=mean(decode, "stream_s"),
            context_token_s=mean(decode, "context_token_s"),
            prompt_token_s=mean(prefill, "prompt_token_s"),
            prompt_step_s=mean(prefill, "prompt_step_s"),
            prompt_pair_s=mean(prefill, "prompt_pair_s"),
        ),
        step_tokens=max(1, min(load.costs.step_tokens for load in prefill)),
        decode_pool_tokens=min(load.pages_total for load in decode) * block_size,
        first_token_overhead_s=sum(link.latency_s for link in links) / len(links) if links else 0.0,
    )


def _serving(residents: Iterable[Resident]) -> Counts:
    serving = [resident.role for resident in residents if resident.stage is Stage.SERVING]
    return Counts(serving.count(Role.PREFILL), serving.count(Role.DECODE))
