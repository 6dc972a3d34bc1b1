"""Adapters of a worker: loaded for who waits, kept while held, dropped for others or when no name is left."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from tests.lora import random_tensors, write_adapter
from tests.unit.worker.rig import eventually
from twostroke.base.errors import ServeError
from twostroke.base.ids import RequestId, SessionId
from twostroke.config.adapters import AdapterConfig
from twostroke.engine.adapters.paced import PacedAdapters
from twostroke.engine.backends.paced.runner import PacedRunner, PacedSpec
from twostroke.engine.loop import EngineThread
from twostroke.kv_cache.memory import PageMemory
from twostroke.models.adapters.peft import WEIGHTS_FILE, read_adapter
from twostroke.request import WeightsRef
from twostroke.scheduler.sequence import Sequence, building
from twostroke.worker.adapters import cache as adapter_cache
from twostroke.worker.adapters.cache import AdapterCache, AdapterMetrics


@dataclass
class Worker:
    """The part of a worker that adapters see."""

    cache: AdapterCache
    slots: PacedAdapters
    registry: CollectorRegistry
    waiting: set[bytes] = field(default_factory=set)
    failed: list[tuple[bytes, ServeError]] = field(default_factory=list)

    def want(self, adapter: WeightsRef) -> bool:
        """A sequence with this adapter waits; whether it may be admitted."""
        self.waiting.add(adapter.digest)
        return self.cache.require(adapter)

    async def use(self, adapter: WeightsRef) -> Sequence:
        """Returns a sequence that has begun with this adapter."""
        await eventually(lambda: self.want(adapter))
        sequence = building(RequestId("r"), SessionId(1), [], [])
        self.cache.hold(sequence, adapter)
        self.waiting.discard(adapter.digest)
        return sequence

    def counted(self, name: str) -> float:
        return self.registry.get_sample_value(f"twostroke_{name}", {"role": "decode"}) or 0.0


@contextlib.asynccontextmanager
async def worker_with(most: int) -> AsyncIterator[Worker]:
    spec = PacedSpec(step_ms=0)
    memory, registry = PageMemory(4, spec.page_bytes_for(4)), CollectorRegistry()
    slots = PacedAdapters()
    runner = PacedRunner(spec, memory, block_size=4, extra=slots)
    engine, config = EngineThread(runner), AdapterConfig(max_loras=most, max_lora_rank=8)
    waiting: set[bytes] = set()
    metrics = AdapterMetrics("decode", registry)
    is_awaited = waiting.__contains__
    cache = AdapterCache(slots, engine, config, metrics, is_awaited=is_awaited, wake=int)
    worker = Worker(cache, slots, registry, waiting)

    def failed(digest: bytes, error: ServeError) -> None:
        waiting.discard(digest)
        worker.failed.append((digest, error))

    running = asyncio.create_task(cache.run(failed))
    try:
        yield worker
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await cache.close()
        assert cache.loaded == []
        engine.close()
        memory.close()


@pytest.fixture
def adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[WeightsRef]:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    folders = [write_adapter(tmp_path / str(seed), random_tensors(seed=seed)) for seed in range(3)]
    return [WeightsRef(read_adapter(folder).digest, str(folder)) for folder in folders]


async def test_an_adapter_is_loaded_for_who_waits_and_steps_may_name_it(adapters: list[WeightsRef]) -> None:
    async with worker_with(2) as worker:
        assert not worker.want(adapters[0])
        await worker.use(adapters[0])
        assert worker.slots.seeds([adapters[0].digest, None])[0] != 0
        assert worker.cache.load_s > 0
        assert (worker.counted("adapters"), worker.counted("adapter_loads_total")) == (1, 1)


async def test_the_one_that_nobody_uses_and_was_used_longest_ago_makes_room(adapters: list[WeightsRef]) -> None:
    async with worker_with(2) as worker:
        for adapter in (adapters[0], adapters[1], adapters[0]):
            worker.cache.release(await worker.use(adapter))
        await worker.use(adapters[2])
        assert set(worker.cache.loaded) == {adapters[0].digest, adapters[2].digest}
        with pytest.raises(KeyError):
            worker.slots.seeds([adapters[1].digest])
        assert worker.counted("adapter_evictions_total") == 1


@pytest.mark.parametrize(("change", "changed"), [("put", 1), ("drop", 0)])
async def test_no_sequence_begins_with_an_adapter_that_is_being_put_or_dropped(
    adapters: list[WeightsRef], monkeypatch: pytest.MonkeyPatch, change: str, changed: int
) -> None:
    async with worker_with(1) as worker:
        worker.cache.release(await worker.use(adapters[0]))
        begun, goes_on, act = threading.Event(), threading.Event(), getattr(worker.slots, change)

        def act_slowly(*said: object) -> None:
            begun.set()
            goes_on.wait(60)
            act(*said)

        monkeypatch.setattr(worker.slots, change, act_slowly)
        worker.want(adapters[1])  # the other one makes room
        await eventually(begun.is_set)
        may_begin = worker.want(adapters[changed])
        goes_on.set()
        assert not may_begin
        await worker.use(adapters[1])


async def test_where_all_are_in_use_a_sequence_waits_until_one_is_released(adapters: list[WeightsRef]) -> None:
    async with worker_with(1) as worker:
        held = [await worker.use(adapters[0]), await worker.use(adapters[0])]
        assert not worker.want(adapters[1])
        for sequence in held:
            await asyncio.sleep(0.05)
            assert worker.cache.loaded == [adapters[0].digest]
            worker.cache.release(sequence)
            worker.cache.release(sequence)  # a second time changes nothing
        await worker.use(adapters[1])


async def test_what_no_name_leads_to_goes_when_nobody_uses_it_and_what_is_named_stays(
    adapters: list[WeightsRef],
) -> None:
    async with worker_with(3) as worker:
        for adapter in adapters[:2]:
            worker.cache.release(await worker.use(adapter))
        held = await worker.use(adapters[0])
        worker.cache.keep_only([adapters[2].digest])
        await eventually(lambda: worker.cache.loaded == [adapters[0].digest])
        worker.cache.release(held)
        await eventually(lambda: worker.cache.loaded == [])
        assert worker.counted("adapter_evictions_total") == 0


async def test_who_comes_late_is_served_once_more_and_leaves_nothing(
    adapters: list[WeightsRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_cache, "UNUSED_S", 0.05)
    async with worker_with(3) as worker:
        worker.cache.keep_only([])
        worker.cache.release(await worker.use(adapters[0]))
        await eventually(lambda: worker.cache.loaded == [])
        worker.want(adapters[1])
        await eventually(lambda: worker.cache.loaded == [adapters[1].digest])
        worker.waiting.clear()  # its client went away before it began
        await eventually(lambda: worker.cache.loaded == [])


async def test_an_adapter_that_cannot_be_read_ends_who_waits_for_it_in_one_line(adapters: list[WeightsRef]) -> None:
    async with worker_with(2) as worker:
        (Path(adapters[0].path) / WEIGHTS_FILE).write_bytes(b"damage")
        worker.want(adapters[0])
        await eventually(lambda: worker.failed)
        digest, error = worker.failed[0]
        assert digest == adapters[0].digest
        assert "is broken" in error.message
        assert "\n" not in error.message
        assert worker.counted("adapter_load_failures_total") == 1
        await worker.use(adapters[1])


async def test_whatever_goes_wrong_while_an_adapter_is_prepared_costs_that_adapter_alone(
    adapters: list[WeightsRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with worker_with(2) as worker:

        def no_memory(adapter: object) -> None:
            raise MemoryError("no room for it")

        with monkeypatch.context() as patched:
            patched.setattr(worker.slots, "prepare", no_memory)
            worker.want(adapters[0])
            await eventually(lambda: worker.failed)
        digest, error = worker.failed[0]
        assert digest == adapters[0].digest
        assert error.message == "the adapter could not be prepared: MemoryError: no room for it"
        assert worker.counted("adapter_load_failures_total") == 1
        await worker.use(adapters[1])
