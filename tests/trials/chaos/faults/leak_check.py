"""Whether anything is left of requests that are over: on any worker, in any router."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

from tests.trials.chaos.faults.outcome import MISMATCHES, Drafts, PoolRest
from tests.trials.chaos.faults.testbed import POLL_S, Bed
from tools.doctor.examine import scrape, value
from tools.doctor.facts import Samples
from tools.doctor.speculation import speculation_in
from twostroke.base.errors import PeerLost, ServeError
from twostroke.config import DRAFT_MODEL, Role
from twostroke.rpc.v1 import fleet_pb2
from twostroke.rpc.v1.control_pb2 import Load

ROUTER_GAUGES = (
    "twostroke_open_requests",
    "twostroke_queued_requests",
    "twostroke_reservations",
    "twostroke_foreign_reservations",
)
"""Gauges of a router that nobody asks anything, all 0."""
DRAFT_PAGES = "twostroke_draft_pages"
REFUSALS = (
    "twostroke_stale_epochs_total",
    "twostroke_stale_epochs_refused_total",
    "twostroke_stale_token_entries_total",
    "twostroke_stale_attempts_total",
    MISMATCHES,
)
"""What those that came back, and bytes that were spoilt, met."""


async def leaks_within(bed: Bed, seconds: float) -> str | None:
    """None as soon as nothing is left; what still is after so long."""
    left: str | None = "nobody has answered"
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while (left := await _left(bed)) is not None:  # other processes have no events here
                await asyncio.sleep(POLL_S)
    return left


async def _left(bed: Bed) -> str | None:
    try:
        view = await bed.view()
        for worker in view.workers:
            held = held_by((await bed.load(worker.address)).load) or await _drafting(bed, worker)
            if held is not None:
                return f"{worker.worker_id}: {held}"
    except ServeError as error:
        return error.message
    wanted = bed.workers * (bed.served.ranks - 1)
    if wanted and (there := len(await asyncio.to_thread(bed.other_ranks))) != wanted:
        return f"{there} processes of other ranks than the first ones instead of {wanted}"
    for router in bed.routers:
        samples = await asyncio.to_thread(scrape, router.metrics)
        for name in ROUTER_GAUGES:
            total = _total(samples, name)
            if total or not samples:
                return f"router {router.http}: {name} {total:g}"
    return None


def held_by(load: Load) -> str | None:
    """What a worker's pool and queues hold; None: nothing but its cache, and no page is missing."""
    busy = {
        "active": load.pages_active,
        "arriving": load.pages_arriving,
        "quarantined": load.pages_quarantined,
        "running": load.running,
        "waiting": load.waiting,
    }
    held = ", ".join(f"{count} {what}" for what, count in busy.items() if count)
    if not held and load.pages_free + load.pages_cached + load.pages_pinned != load.pages_total:
        held = (
            f"{load.pages_free} free, {load.pages_cached} cached and {load.pages_pinned} pinned "
            f"of {load.pages_total} pages"
        )
    return held or None


async def _drafting(bed: Bed, worker: fleet_pb2.WorkerEntry) -> str | None:
    """Says which pages its draft model still has."""
    pages = await _draft_pages(bed, worker)
    return f"{pages} pages of the draft model" if pages else None


async def _draft_pages(bed: Bed, worker: fleet_pb2.WorkerEntry) -> int | None:
    if not bed.served.has_draft_model or worker.role != Role.DECODE.value:
        return None
    samples = await asyncio.to_thread(scrape, worker.metrics_address)
    if DRAFT_PAGES not in samples:
        raise PeerLost(f"{worker.worker_id} does not tell {DRAFT_PAGES}")
    return int(value(samples, DRAFT_PAGES, state="active") or 0)


async def pool_rests(bed: Bed) -> list[PoolRest]:
    """Returns what became of the pages of each worker. Raises ServeError."""
    found = []
    for worker in sorted((await bed.view()).workers, key=lambda each: each.worker_id):
        load = (await bed.load(worker.address)).load
        rest = PoolRest(
            worker=worker.worker_id,
            ranks=bed.served.ranks,
            total=load.pages_total,
            free=load.pages_free,
            cached=load.pages_cached,
            pinned=load.pages_pinned,
            drafting=await _draft_pages(bed, worker),
        )
        found.append(rest)
    return found


async def drafts(bed: Bed) -> dict[str, Drafts]:
    """Returns what the draft model of each epoch of a decode worker has counted. Raises ServeError."""
    counted: dict[str, Drafts] = {}
    for worker in (await bed.view()).workers if bed.served.has_draft_model else ():
        samples = await asyncio.to_thread(scrape, worker.metrics_address)
        for facts in speculation_in(samples).drafters:
            if facts.drafter == DRAFT_MODEL:
                counted[worker.epoch] = Drafts(facts.drafted, facts.kept)
    return counted


async def refusals(bed: Bed) -> Counter[str]:
    """Counts the refusals of all processes that answer, since they began."""
    counted: Counter[str] = Counter()
    view = await bed.view()
    workers = [worker.metrics_address for worker in view.workers if worker.metrics_address]
    for address in (*workers, *(router.metrics for router in bed.routers)):
        samples = await asyncio.to_thread(scrape, address)
        counted.update({name: int(_total(samples, name)) for name in REFUSALS if name in samples})
    return counted


def _total(samples: Samples, name: str) -> float:
    return sum(value for _, value in samples.get(name, ()))
