"""How long the device takes, by its own events, and what it can do at most: copying, and multiplying matrices.

Without a GPU everything here works on the CPU, once and at toy sizes, so that the script itself can be rehearsed.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from tests.trials.gpu.report import Report, Row

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if ON_GPU else "cpu")
COPY_BYTES = 4 << 30 if ON_GPU else 1 << 16
MATMUL = 8192 if ON_GPU else 64
TOY_BYTES = 4 << 30
LEAST_RUNS = 15
IN_FLIGHT = 8
"""Runs that are launched before the host waits: else each would begin with the wait for its launch."""
ENOUGH_MS = 400.0
"""The measured time beyond which no more runs are made than LEAST_RUNS."""


def median_ms(launch: Callable[[], object]) -> float:
    """Returns the median of many runs after a warm-up, by events around each. The next ones are queued already."""
    if not ON_GPU:
        return _once_ms(launch)
    for _ in range(3):
        launch()
    torch.cuda.synchronize()
    times: list[float] = []
    while len(times) < LEAST_RUNS or (sum(times) < ENOUGH_MS and len(times) < 400):
        times += _queued_ms(launch)
    return statistics.median(times)


def _queued_ms(launch: Callable[[], object]) -> list[float]:
    pairs = []
    for _ in range(IN_FLIGHT):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        launch()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in pairs]


def replayed_ms(launch: Callable[[], object]) -> float:
    """The same of a CUDA graph of `launch`: without the gaps between launches that a graph does away with."""
    return median_ms(recorded(launch))


def recorded(launch: Callable[[], object]) -> Callable[[], object]:
    """Returns what replays a CUDA graph of `launch`, which has run before; without a GPU `launch` itself."""
    if not ON_GPU:
        return launch
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            launch()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    replay: Callable[[], object] = graph.replay
    return replay


def _once_ms(launch: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    launch()
    return (time.perf_counter() - began_s) * 1e3


def l2_bytes() -> int:
    return int(torch.cuda.get_device_properties(DEVICE).L2_cache_size) if ON_GPU else 1


def free_bytes() -> int:
    """Once what earlier sections have left behind is given back."""
    if not ON_GPU:
        return TOY_BYTES
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(DEVICE)[0]


def ceilings(report: Report) -> Iterator[Row]:
    """Bytes per second of a large copy (read and written); FLOP per second of a large bf16 product."""
    report.ceilings["copy"] = _copy_rate()
    yield Row("copy", f"{report.ceilings['copy'] / 1e12:.2f} TB/s")
    report.ceilings["matmul"] = _matmul_rate()
    yield Row("bf16 matmul", f"{report.ceilings['matmul'] / 1e12:.0f} TFLOP/s")


def _copy_rate() -> float:
    size = min(COPY_BYTES, free_bytes() // 4)
    source = torch.empty(size // 2, dtype=torch.bfloat16, device=DEVICE).normal_()
    target = torch.zeros_like(source)
    ms = median_ms(lambda: target.copy_(source))
    assert torch.equal(source[-1000:], target[-1000:])
    return 2 * source.nbytes / (ms / 1e3)


def _matmul_rate() -> float:
    a, b = (torch.randn(MATMUL, MATMUL, device=DEVICE).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    return 2 * MATMUL**3 / (median_ms(lambda: torch.matmul(a, b, out=out)) / 1e3)
