"""What a worker exports of itself."""

from __future__ import annotations

from prometheus_client import generate_latest

from twostroke.config import Role
from twostroke.engine.build import KernelsInUse
from twostroke.worker.metrics import WorkerMetrics


def samples(kernels: KernelsInUse | None) -> list[str]:
    metrics = WorkerMetrics(Role.DECODE, 16)
    metrics.computes_with(kernels)
    return [line for line in generate_latest(metrics.registry).decode().splitlines() if "kernels_info{" in line]


def test_the_kernels_in_use_are_one_series_and_none_where_a_device_computes() -> None:
    assert samples(KernelsInUse("avx512_bf16", "measured", 2)) == [
        'twostroke_kernels_info{reason="measured",role="decode",threads="2",variant="avx512_bf16"} 1.0'
    ]
    assert samples(None) == []
