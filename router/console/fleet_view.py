"""The fleet as the page shows it: sums over all workers, rates since the last snapshot, and the busiest workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from starlette.responses import JSONResponse

from router.fleet.worker import Worker
from router.requests.request_handler import RequestHandler
from twostroke.config import Role
from twostroke.rpc.events import tier_from_message
from twostroke.rpc.v1.control_pb2 import Load

MOST_WORKERS = 64
"""Most workers that one reply lists: the page draws each of them every second. Others can be searched by name."""
MOST_LISTS = 16
"""Most replies that one snapshot keeps for other viewers."""
LONGEST_RATE_S = 10.0
"""Most seconds between two snapshots from which rates are computed."""
PAGE_STATES = ("free", "cached", "pinned", "arriving", "active", "quarantined")


@dataclass(frozen=True, slots=True)
class _Counts:
    """The counters that only grow, at one moment."""

    at_s: float
    sent_tokens: int
    queried_tokens: int
    hit_tokens: int
    busy_s: Mapping[str, float]
    """Seconds that each worker has spent on prompts, by worker id."""


class FleetView:
    def __init__(self, handler: RequestHandler, router_id: str = "") -> None:
        self._handler = handler
        self._router_id = router_id
        self._before: _Counts | None = None

    def take_snapshot(self) -> FleetViewSnapshot:
        """Takes a snapshot of the workers. Its rates are those since the last one."""
        workers = self._handler.dispatcher.operations.workers()
        now = _Counts(
            time.monotonic(),
            self._handler.metrics.sent_tokens.tokens,
            sum(worker.load.queried_tokens for worker in workers),
            sum(worker.load.hit_tokens for worker in workers),
            {worker.worker_id: worker.load.prefill_busy_s for worker in workers},
        )
        before, self._before = self._before, now
        if before is not None and now.at_s - before.at_s > LONGEST_RATE_S:
            before = None
        return FleetViewSnapshot(workers, now, before, self._router())

    def _router(self) -> dict[str, Any]:
        dispatcher = self._handler.dispatcher
        state = "draining" if dispatcher.is_draining else "ready" if dispatcher.is_ready else "not ready"
        return {"router": self._router_id, "state": state, "at_s": time.time()}


class FleetViewSnapshot:
    """The workers at one moment. Replies about them are made when they are asked for, and kept for other viewers."""

    def __init__(
        self, workers: Sequence[Worker], now: _Counts, before: _Counts | None, router: Mapping[str, Any]
    ) -> None:
        """`router` are the fields of a reply that are about the router itself."""
        self._workers = workers
        self._router = router
        self._now = now
        self._before = before
        self.totals = self._totals()
        self._answers: dict[str, bytes] = {}
        """Replies from this snapshot, by the name that viewers search for."""

    def answer(self, name: str) -> bytes:
        """Returns `listed` and the router's state as JSON, made once for all viewers that search for the same name."""
        known = self._answers.get(name)
        if known is None:
            known = rendered({**self._router, **self.listed(name)})
            if len(self._answers) < MOST_LISTS:
                self._answers[name] = known
        return known

    def listed(self, name: str) -> dict[str, Any]:
        """Returns the sums, and the workers whose names contain `name`. Of too many, those with the longest queues."""
        found = [worker for worker in self._workers if name in worker.worker_id]
        if len(found) > MOST_WORKERS:
            found = sorted(found, key=_queue_length, reverse=True)[:MOST_WORKERS]
        found.sort(key=lambda worker: (worker.role.value, _natural(worker.worker_id)))
        return {**self.totals, "workers": [self._values(worker) for worker in found]}

    def _totals(self) -> dict[str, Any]:
        before, now = self._before, self._now
        rates: dict[str, float | None] = {"tokens_per_s": None, "hit_rate_now": None}
        if before is not None and now.at_s > before.at_s:
            rates["tokens_per_s"] = max(0, now.sent_tokens - before.sent_tokens) / (now.at_s - before.at_s)
            queried = now.queried_tokens - before.queried_tokens
            if queried > 0:
                rates["hit_rate_now"] = _share(now.hit_tokens - before.hit_tokens, queried)
        return {
            **rates,
            "hit_rate": _share(now.hit_tokens, now.queried_tokens) if now.queried_tokens else None,
            "worker_count": len(self._workers),
            "roles": [self._role(role) for role in (Role.PREFILL, Role.DECODE)],
            "tiers": _tier_sums(worker.load for worker in self._workers),
        }

    def _role(self, role: Role) -> dict[str, Any]:
        loads = [worker.load for worker in self._workers if worker.role is role]
        statuses: dict[str, int] = {}
        for worker in self._workers:
            if worker.role is role:
                statuses[worker.status.value] = statuses.get(worker.status.value, 0) + 1
        return {
            "role": role.value,
            "statuses": statuses,
            "running": sum(load.running for load in loads),
            "waiting": sum(load.waiting for load in loads),
            "queued_tokens": sum(load.queued_tokens for load in loads),
            "pages": {state: sum(getattr(load, f"pages_{state}") for load in loads) for state in PAGE_STATES},
        }

    def _values(self, worker: Worker) -> dict[str, Any]:
        load, server = worker.load, worker.server
        return {
            "worker": worker.worker_id,
            "role": worker.role.value,
            "status": worker.status.value,
            "epoch": str(worker.epoch),
            "running": load.running,
            "slots": load.slots,
            "waiting": load.waiting,
            "queued_tokens": load.queued_tokens,
            "queued_s": worker.queue_s(time.monotonic()),
            "step_s": load.seconds_per_step,
            "busy": self._busy(worker),
            "pages": {state: getattr(load, f"pages_{state}") for state in PAGE_STATES},
            "further_pages": _further_pages(load),
            "form": "" if server is None else server.kv_form,
            "page_bytes": worker.page_bytes,
            "tiers": _tier_sums([load]),
            "hit_rate": _share(load.hit_tokens, load.queried_tokens) if load.queried_tokens else None,
            "kernels": "" if server is None else server.kernels.variant,
        }

    def _busy(self, worker: Worker) -> float | None:
        """Returns the share of time that a worker has spent on prompts since the last snapshot. None: not known."""
        before = self._before
        if before is None or worker.worker_id not in before.busy_s:
            return None
        spent_s = worker.load.prefill_busy_s - before.busy_s[worker.worker_id]
        return _share(spent_s, self._now.at_s - before.at_s)


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0


def _queue_length(worker: Worker) -> tuple[float, int, int]:
    return worker.load.queued_s, worker.load.waiting, worker.load.running


def _natural(name: str) -> tuple[str, int, str]:
    """Orders decode-2 before decode-10."""
    head, _, tail = name.rpartition("-")
    return head, int(tail) if tail.isdecimal() else 0, name


def _further_pages(load: Load) -> dict[str, int] | None:
    if not load.HasField("further"):
        return None
    return {state: getattr(load.further, state) for state in PAGE_STATES}


def _tier_sums(loads: Iterable[Load]) -> list[dict[str, Any]]:
    """Sums up the tiers below the pages."""
    sums: dict[str, dict[str, Any]] = {}
    for load in loads:
        for rate in load.tiers:
            name = tier_from_message(rate.tier).name.lower()
            own = sums.setdefault(name, {"tier": name, "blocks": 0, "used_bytes": 0, "capacity_bytes": 0})
            own["blocks"] += rate.blocks
            own["used_bytes"] += rate.used_bytes
            own["capacity_bytes"] += rate.capacity_bytes
    return list(sums.values())


Value = TypeVar("Value")

PERIOD_S = 0.9
"""Seconds for which a value is kept. Pages ask every second, and one that asks a little early gets a new value, too."""
SHARE = 0.002
"""Share of the router's time that making one value may take: for three values, less than a hundredth. If a snapshot of
the fleet takes 5 ms, one is taken every 2.5 s."""


class Shared(Generic[Value]):
    """A value that several viewers share. It is made anew, on the event loop, if it is too old when it is asked for."""

    def __init__(self, make: Callable[[], Value], clock: Callable[[], float] = time.monotonic) -> None:
        self._make = make
        self._clock = clock
        self._value: Value | None = None
        self._fresh_until_s = 0.0

    def get(self) -> Value:
        begun_s = self._clock()
        if self._value is None or begun_s >= self._fresh_until_s:
            self._value = self._make()
            ended_s = self._clock()
            self._fresh_until_s = ended_s + max(PERIOD_S, (ended_s - begun_s) / SHARE)
        return self._value


def rendered(view: Mapping[str, Any]) -> bytes:
    """Returns an answer of the console's API as JSON: several viewers get the same bytes."""
    return bytes(JSONResponse(view).body)
