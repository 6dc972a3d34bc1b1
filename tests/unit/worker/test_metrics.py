"""What a worker exports of itself."""

from __future__ import annotations

import collections
import contextlib
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from prometheus_client import generate_latest

from tests.unit.scheduler.bench import Bench
from twostroke.base.ids import Epoch
from twostroke.config import Role
from twostroke.engine.backends.built import KernelsInUse
from twostroke.engine.backends.memory_plan import MemoryUse
from twostroke.kv_cache.events import EventLog
from twostroke.models.expert_load import ExpertLoad
from twostroke.worker.metrics import WorkerMetrics


def samples(kernels: KernelsInUse | None) -> list[str]:
    metrics = WorkerMetrics(Role.DECODE, 16)
    metrics.computes_with(kernels)
    return [line for line in generate_latest(metrics.registry).decode().splitlines() if "kernels_info{" in line]


def test_the_kernels_in_use_are_one_series_and_none_where_a_device_computes() -> None:
    assert samples(KernelsInUse("avx512_bf16", "measured", 4, ranks=2)) == [
        'twostroke_kernels_info{ranks="2",reason="measured",role="decode",threads="4",variant="avx512_bf16"} 1.0'
    ]
    assert samples(None) == []


def test_memory_is_exported_as_billed_and_as_measured_where_it_is() -> None:
    metrics = WorkerMetrics(Role.DECODE, 16)
    metrics.uses_memory([MemoryUse("pages", 100, 104), MemoryUse("weights", 50, None)])
    lines = generate_latest(metrics.registry).decode().splitlines()
    assert [line for line in lines if line.startswith("twostroke_memory_")] == [
        'twostroke_memory_billed_bytes{part="pages",role="decode"} 100.0',
        'twostroke_memory_billed_bytes{part="weights",role="decode"} 50.0',
        'twostroke_memory_measured_bytes{part="pages",role="decode"} 104.0',
    ]


def test_experts_are_exported_with_their_tokens_and_how_uneven_they_are() -> None:
    metrics = WorkerMetrics(Role.DECODE, 16)
    metrics.watch_experts(ExpertLoad(np.array([[6, 2], [4, 4], [0, 0]])))
    lines = generate_latest(metrics.registry).decode().splitlines()
    assert [line for line in lines if line.startswith("twostroke_expert_")] == [
        'twostroke_expert_tokens_total{expert="0",role="decode"} 10.0',
        'twostroke_expert_tokens_total{expert="1",role="decode"} 6.0',
        'twostroke_expert_imbalance_ratio{role="decode"} 1.25',
    ]


def test_a_page_is_made_while_sequences_come_and_go() -> None:
    """Pages are made on a thread of their own, and the event loop changes what the gauges tell of."""
    bench = Bench(pages=64)
    metrics = WorkerMetrics(Role.DECODE, bench.limits.block_size)
    metrics.watch(bench.pool, bench.scheduler, EventLog(Epoch(1, 2)))
    running = collections.deque(bench.answer([number]) for number in range(16))
    bench.scheduler.admit()
    assert bench.scheduler.running == 16
    with ThreadPoolExecutor(1) as pool, switching_often():
        pages = pool.submit(lambda: [generate_latest(metrics.registry) for _ in range(50)])
        while not pages.done():
            bench.scheduler.end(running.popleft())
            running.append(bench.answer([0]))
            bench.scheduler.admit()
        assert len(pages.result()) == 50


@contextlib.contextmanager
def switching_often() -> Iterator[None]:
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval_s)
