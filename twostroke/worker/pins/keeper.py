"""The pin keeper holds a worker's pins: it has missing blocks computed, counts hits, and ends pins in time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from twostroke.base.errors import Overloaded, PinRefused
from twostroke.base.fault_points import Point, reach
from twostroke.base.ids import PinId, RequestId
from twostroke.kv_cache.pins.pin_table import Pin, PinHits, PinLimits, PinTable, pin_id_of
from twostroke.observability.telemetry import family_of
from twostroke.request import Attempt, CacheHint
from twostroke.rpc.v1 import worker_pb2
from twostroke.scheduler.sequence import Sequence, building
from twostroke.scheduler.values import AdmittedSequence
from twostroke.worker.branches import BranchHost
from twostroke.worker.condition import Condition
from twostroke.worker.supply.remote import Ordered, Supplies
from twostroke.worker.supply.supply import SupplyListener

log = logging.getLogger(__name__)

LOOK_S = 5.0
"""Seconds between two checks for missing blocks: the queue may have been full, or blocks were forgotten."""
RENEWED_SHARE = 0.125
"""Fraction of its duration by which a repeated hint must end later to be renewed: most requests change nothing."""


REFUSALS = ("pin_cap", "pin_tenant_cap", "max_bytes", "expires_s", "pins")
"""Reasons to refuse a pin: the field whose limit it breaks."""


class PinMetrics:
    def __init__(self, role: str, registry: CollectorRegistry, table: PinTable) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"twostroke_{name}", text, ("role", *labels), registry=registry)

        self._role = role
        self._hits = counter("pin_hits_total", "Admissions that found all blocks of a pin.").labels(role)
        self._saved = counter("pin_saved_seconds_total", "Predicted computing time that pins spared.").labels(role)
        self.expiries = counter("pin_expiries_total", "Pins whose time was over.").labels(role)
        self.displaced = counter(
            "displaced_hints_total", "Cache hints that ended early: a pin took their room."
        ).labels(role)
        self._refusals = counter("pin_refusals_total", "Pins that a cap refused.", "reason", "kind")
        for reason in REFUSALS:
            for kind in ("pin", "hint"):
                self._refusals.labels(role, reason, kind)
        registry.register(_Gauges(role, table))

    def found(self, hits: PinHits) -> None:
        self._hits.inc(hits.hits)
        self._saved.inc(hits.saved_s)

    def refused(self, reason: str, *, is_hint: bool) -> None:
        """Counts a refused pin. `reason`: one of REFUSALS."""
        self._refusals.labels(self._role, reason, "hint" if is_hint else "pin").inc()


class _Gauges(Collector):
    def __init__(self, role: str, table: PinTable) -> None:
        self._role = role
        self._table = table

    def collect(self) -> Iterable[GaugeMetricFamily]:
        limits, pages = self._table.limits, self._table.pinned_blocks
        for name, text, value in (
            ("pins", "Pins and cache hints held.", len(self._table)),
            ("pinned_pages", "Distinct pages that pins keep, whether or not they are filled.", pages),
            ("pinned_bytes", "Bytes of those pages.", pages * limits.page_bytes),
            ("pin_pages_limit", "Pages that pins may keep.", limits.most),
        ):
            yield family_of(GaugeMetricFamily, self._role, name, text, value)


@dataclass(frozen=True, slots=True)
class PinState:
    """One pin as it is now."""

    pin: Pin
    missing: int
    """Blocks that are not readable here."""
    hits: int
    saved_s: float
    problem: str
    """Why it is not ready, if something is wrong."""


class PinKeeper:
    """Pins of one epoch of a worker; `tasks` end with it."""

    def __init__(self, host: BranchHost, tasks: asyncio.TaskGroup, clock: Callable[[], float] = time.time) -> None:
        """`clock`: Unix seconds."""
        self._host = host
        self._supplies = Supplies(host, tasks)
        self._clock = clock
        self.table = PinTable(host.pool, _limits_of(host))
        self.metrics = PinMetrics(host.config.role.value, host.metrics.registry, self.table)
        self.building: dict[Sequence, PinId] = {}
        """Sequence and id of the pin that is computed now, if there is one."""
        self._sources: dict[PinId, worker_pb2.PageSource] = {}
        """Workers that compute what a pin lacks here."""
        self._failures: dict[PinId, str] = {}
        self._changed = Condition()

    def put(self, pin: Pin, source: worker_pb2.PageSource | None = None) -> None:
        """Holds a pin, and begins to compute what is missing. Raises PinRefused."""
        reach(Point.PIN_PUTTING)
        try:
            ended = self.table.put(pin, self._clock())
        except PinRefused as refused:
            self.metrics.refused(str(refused.field), is_hint=pin.is_hint)
            raise
        self.metrics.displaced.inc(len(ended))
        self._failures.pop(pin.pin_id, None)
        if source is not None and source.worker_id != self._host.config.worker_id:
            self._sources[pin.pin_id] = source
        self._changed.notify()
        self._build_missing()
        log.info("pinned pin=%s owner=%s blocks=%d hint=%s", pin.pin_id, pin.owner, len(pin.block_hashes), pin.is_hint)

    def hint(self, attempt: Attempt) -> None:
        """Pins first blocks of a request for a while, as its hints ask; a refusal is counted and changes nothing."""
        for hint in attempt.request.hints:
            if hint.blocks and attempt.block_hashes:
                self._keep(attempt, hint)

    def _keep(self, attempt: Attempt, hint: CacheHint) -> None:
        tenant = attempt.request.hint_tenant
        block_size, hashes = self._host.facts.block_size, attempt.block_hashes[: hint.blocks]
        pin_id, expires_s = pin_id_of("", tenant, hashes[-1]), self._clock() + hint.seconds
        known = self.table.get(pin_id)
        if known is not None:
            if known.expires_s is not None and expires_s - known.expires_s >= RENEWED_SHARE * hint.seconds:
                self.table.renew(pin_id, expires_s)
            return
        tokens = tuple(attempt.known[: len(hashes) * block_size])
        pin = Pin(
            pin_id=pin_id, owner="", tenant=tenant, tokens=tokens, block_hashes=hashes,
            expires_s=expires_s, is_hint=True,
        )  # fmt: skip
        with contextlib.suppress(PinRefused):
            self.put(pin)

    def remove(self, pin_id: PinId) -> bool:
        """Ends a pin; returns False if there is none, which is not an error."""
        pin = self.table.remove(pin_id)
        if pin is not None:
            self._ended(pin)
            log.info("unpinned pin=%s owner=%s", pin.pin_id, pin.owner)
        return pin is not None

    def states(self, *, with_hints: bool) -> list[PinState]:
        """Returns all pins, the oldest first."""
        return [self.state(pin) for pin in self.table.pins if with_hints or not pin.is_hint]

    def state(self, pin: Pin) -> PinState:
        hits = self.table.hits(pin.pin_id)
        problem = self._failures.get(pin.pin_id, "")
        return PinState(pin, self.table.missing(pin), hits.hits, hits.saved_s, problem)

    async def watch(self) -> None:
        """Ends pins in time, and computes again what is missing, until cancelled."""
        while True:
            changed = self._changed.ticket()
            for pin in self.table.expire(self._clock()):
                self.metrics.expiries.inc()
                self._ended(pin)
                log.info("pin expired pin=%s owner=%s", pin.pin_id, pin.owner)
            self._build_missing()
            end_s = self.table.next_end_s
            pause_s = LOOK_S if end_s is None else min(LOOK_S, end_s - self._clock())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, pause_s)):
                    await changed.wait()

    def stop_building(self) -> None:
        """Gives up what is being computed: the worker drains or ends."""
        for sequence in list(self.building):
            self._end_build(sequence)

    # Calls by the work loop

    def began(self, admission: AdmittedSequence) -> None:
        """Lets suppliers bring what is missing, the pin's source too; what does not come is computed here."""
        pin_id = self.building[admission.sequence]
        pin, source = self.table.get(pin_id), self._sources.pop(pin_id, None)
        ordered = Ordered(source, weights=None if pin is None else pin.weights)
        self._supplies.of(admission.sequence, ordered, SupplyListener()).begin(admission.missing)

    def found(self, sequence: Sequence) -> None:
        """Counts what a sequence of the role found here when it was first admitted."""
        if sequence.preemptions or not sequence.hit_blocks:
            return
        hits = self.table.admitted(sequence.block_hashes[: sequence.hit_blocks], self._price_s)
        if hits is not None:
            self.metrics.found(hits)

    def end_finished(self) -> None:
        """Releases the pages of builds with all blocks here: the pins keep them."""
        pool = self._host.pool
        for sequence in list(self.building):
            if sequence.pages and pool.hits(sequence.block_hashes) == len(sequence.block_hashes):
                reach(Point.PIN_BUILT)
                self._end_build(sequence)

    def failed(self, sequence: Sequence, error: Exception) -> None:
        """Notes why a pin's blocks cannot be computed. They are not tried again until the pin is put again."""
        pin_id = self.building.pop(sequence)
        self._failures[pin_id] = f"a step that computes it fails: {type(error).__name__}: {error}"
        self._changed.notify()  # the next pin's turn
        log.error("pin failed pin=%s error=%s", pin_id, error)

    # Internals

    def _price_s(self, blocks: int) -> float:
        """Returns the predicted seconds of computing that many first blocks here."""
        host = self._host
        return host.loop.rates.cost.of_prompt(blocks * host.facts.block_size, 0, host.scheduler.step_tokens)

    def _build_missing(self) -> None:
        """Queues a sequence for the oldest pin with missing blocks, unless one is computed already.

        Pins come one at a time: a request never waits for more than one of them, however many a worker is given.
        """
        host = self._host
        if self.building or host.validator.is_draining or not host.pool.lacks_pinned:
            return
        pin = next(filter(self._lacks_blocks, self.table.pins), None)
        if pin is None:
            return
        reach(Point.PIN_BUILDING)
        name, session = RequestId(f"pin-{pin.pin_id}"), host.new_session()
        sequence = building(name, session, pin.tokens, pin.block_hashes, host.branches.constraints_of(pin.weights))
        if pin.pin_id in self._sources:
            sequence.pulled_blocks = len(pin.block_hashes)
        with contextlib.suppress(Overloaded):  # the next check tries again
            host.scheduler.enqueue(sequence)
            self.building[sequence] = pin.pin_id
            host.loop.wake()

    def _lacks_blocks(self, pin: Pin) -> bool:
        """Returns whether blocks of a pin are to be computed here."""
        return not pin.is_hint and pin.pin_id not in self._failures and self.table.missing(pin) > 0

    def _end_build(self, sequence: Sequence) -> None:
        del self.building[sequence]
        self._changed.notify()  # the next pin's turn
        self._host.scheduler.end(sequence)
        self._host.pulls.prune()
        self._host.loop.wake()

    def _ended(self, pin: Pin) -> None:
        self._failures.pop(pin.pin_id, None)
        self._sources.pop(pin.pin_id, None)
        for sequence in [each for each, pin_id in self.building.items() if pin_id == pin.pin_id]:
            self._end_build(sequence)


def _limits_of(host: BranchHost) -> PinLimits:
    facts, cache = host.facts, host.config.cache
    longest = min(facts.pages, -(-facts.max_model_len // facts.block_size))
    return PinLimits.of(facts.pages, facts.page_bytes, longest, share=cache.pin_cap, tenant_share=cache.pin_tenant_cap)
