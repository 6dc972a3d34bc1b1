"""The adapters that a worker has loaded: on demand, a bounded number, the least recently used making room."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge

from twostroke.base.errors import EngineLost, InternalError, ServeError
from twostroke.config.adapters import AdapterConfig
from twostroke.engine.adapters.slots import AdapterSlots
from twostroke.engine.loop import EngineThread
from twostroke.models.adapters.store import read_kept
from twostroke.request import WeightsRef
from twostroke.scheduler.sequence import Sequence
from twostroke.worker.condition import Condition

log = logging.getLogger(__name__)

UNUSED_S: Final = 2.0
"""Seconds for which an adapter that was just loaded waits for the sequence that wanted it."""

Result = TypeVar("Result")


@dataclass(slots=True)
class _Loaded:
    at_s: float
    used: int
    """Number of its latest use: a higher one is later."""
    holders: int = 0
    was_held: bool = False


class AdapterMetrics:
    def __init__(self, role: str, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(f"twostroke_{name}", text, ("role",), registry=registry).labels(role)

        self.count = Gauge("twostroke_adapters", "Adapters that are loaded.", ("role",), registry=registry).labels(role)
        self._loads = counter("adapter_loads_total", "Adapters that were loaded.")
        self._seconds = counter("adapter_load_seconds_total", "Time that loading adapters took.")
        self.evictions = counter("adapter_evictions_total", "Adapters that made room for others.")
        self.failures = counter("adapter_load_failures_total", "Adapters that could not be loaded.")

    def loaded(self, seconds: float, count: int) -> None:
        """Counts a load. `count`: adapters that are loaded now."""
        self._loads.inc()
        self._seconds.inc(seconds)
        self.count.set(count)


class AdapterCache:
    """The `AdapterGate` of a worker. Every method runs on the worker's event loop."""

    def __init__(
        self,
        slots: AdapterSlots,
        engine: EngineThread,
        config: AdapterConfig,
        metrics: AdapterMetrics,
        *,
        is_awaited: Callable[[bytes], bool],
        wake: Callable[[], None],
    ) -> None:
        """`is_awaited` says whether a waiting sequence has this adapter; `wake` lets the work loop admit again."""
        self._slots = slots
        self._engine = engine
        self._config = config
        self._metrics = metrics
        self._is_awaited = is_awaited
        self._wake = wake
        self._loaded: dict[bytes, _Loaded] = {}
        self._wanted: dict[bytes, WeightsRef] = {}
        self._held: dict[Sequence, bytes] = {}
        self._named: frozenset[bytes] | None = None
        """Digests of the adapters that have names; None until the supervisor has sent them."""
        self._uses = itertools.count()
        self._changed = Condition()
        self.load_s = 0.0
        """Seconds that loading an adapter takes, smoothed; 0 while unknown."""

    @property
    def loaded(self) -> list[bytes]:
        """Digests of the adapters that are loaded."""
        return list(self._loaded)

    def require(self, adapter: WeightsRef) -> bool:
        known = self._loaded.get(adapter.digest)
        if known is not None:
            known.used = next(self._uses)
            return True
        if adapter.digest not in self._wanted:
            self._wanted[adapter.digest] = adapter
            self._changed.notify()
        return False

    def hold(self, sequence: Sequence, adapter: WeightsRef) -> None:
        if sequence not in self._held:
            known = self._loaded[adapter.digest]
            known.holders += 1
            known.was_held = True
            self._held[sequence] = adapter.digest

    def release(self, sequence: Sequence) -> None:
        digest = self._held.pop(sequence, None)
        if digest is not None:
            self._loaded[digest].holders -= 1
            self._changed.notify()

    def keep_only(self, digests: Iterable[bytes]) -> None:
        """Frees all other adapters as soon as they have no holders: they have no names any more.

        A request that was routed before may still need such an adapter. Then it is loaded again, and freed afterwards.
        """
        self._named = frozenset(digests)
        self._changed.notify()

    async def run(self, failed: Callable[[bytes, ServeError], None]) -> None:
        """Loads what is wanted, until cancelled. `failed` ends the sequences with an adapter that cannot be loaded."""
        while True:
            ticket = self._changed.ticket()
            await self._free_unnamed()
            for digest, adapter in list(self._wanted.items()):
                if not self._is_awaited(digest):
                    del self._wanted[digest]
                elif await self._make_room():
                    await self._load(adapter, failed)
            await self._wait(ticket.wait())

    async def close(self) -> None:
        """Drops all adapters: the next epoch of this process begins without any."""
        if not self._engine.is_lost:
            for digest in list(self._loaded):
                await self._drop(digest)

    async def _wait(self, changed: Any) -> None:
        """Waits for a change, or for `UNUSED_S`: a loaded adapter may stay unused because its request has gone."""
        try:
            async with asyncio.timeout(UNUSED_S if self._wanted or self._unnamed() else None):
                await changed
        except TimeoutError:
            return

    async def _load(self, adapter: WeightsRef, failed: Callable[[bytes, ServeError], None]) -> None:
        started_s, digest = time.monotonic(), adapter.digest
        try:
            prepared = await asyncio.to_thread(self._prepared, adapter)
        except EngineLost:
            raise
        except Exception as problem:
            error = _refusal(problem)
            log.warning("adapter not loaded adapter=%s error=%s", digest.hex(), error.message)
            self._metrics.failures.inc()
            del self._wanted[digest]
            failed(digest, error)
            return
        await self._engine.between_steps(partial(self._slots.put, digest, prepared))
        seconds = time.monotonic() - started_s
        self.load_s = seconds if not self.load_s else 0.7 * self.load_s + 0.3 * seconds
        del self._wanted[digest]
        self._loaded[digest] = _Loaded(time.monotonic(), next(self._uses))
        self._metrics.loaded(seconds, len(self._loaded))
        log.info("adapter loaded adapter=%s ms=%.1f", digest.hex(), 1e3 * seconds)
        self._wake()

    def _prepared(self, adapter: WeightsRef) -> Any:
        """Reads and prepares an adapter. Raises ServeError, or whatever damaged files or a lack of memory raise."""
        read = read_kept(adapter.digest, Path(adapter.path), most_lora_rank=self._config.max_lora_rank)
        return self._slots.prepare(read)

    async def _make_room(self) -> bool:
        """Evicts an adapter if no other fits; returns whether there is room for one more."""
        if len(self._loaded) < self._config.max_loras:
            return True
        now_s = time.monotonic()
        idle = [
            digest
            for digest, known in self._loaded.items()
            if not known.holders and (known.was_held or now_s - known.at_s > UNUSED_S)
        ]
        if not idle:
            return False
        await self._drop(min(idle, key=lambda digest: self._loaded[digest].used))
        self._metrics.evictions.inc()
        return True

    def _unnamed(self) -> list[bytes]:
        return [] if self._named is None else [digest for digest in self._loaded if digest not in self._named]

    async def _free_unnamed(self) -> None:
        for digest in self._unnamed():
            if not self._loaded[digest].holders and not self._is_awaited(digest):
                await self._drop(digest)

    async def _drop(self, digest: bytes) -> None:
        del self._loaded[digest]  # first: no sequence may begin with it while a step ends
        await self._engine.between_steps(partial(self._slots.drop, digest))
        self._metrics.count.set(len(self._loaded))
        log.info("adapter dropped adapter=%s", digest.hex())


def _refusal(problem: Exception) -> ServeError:
    """Returns the error that ends the sequences that want the adapter. The worker continues to serve all others."""
    if isinstance(problem, ServeError):
        return problem
    log.error("adapter not prepared", exc_info=problem)
    return InternalError(f"the adapter could not be prepared: {type(problem).__name__}: {problem}")
