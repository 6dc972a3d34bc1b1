"""All parts for each number of threads and each kind of kernels: a table, JSON."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from cluster.flags.checks import STDOUT
from tests.trials.bench.kernels.bench_attention import bench_decode, bench_forms, bench_prefill
from tests.trials.bench.kernels.bench_experts import bench_experts
from tests.trials.bench.kernels.bench_latents import bench_latents
from tests.trials.bench.kernels.bench_linear import bench_linear
from tests.trials.bench.kernels.bench_step import bench_step
from tests.trials.bench.kernels.options import KernelOptions
from tests.trials.bench.kernels.setting import Setting, check_kernels, setting_of
from tests.trials.bench.kernels.timing import Result
from tools.output import write_json
from twostroke.base.errors import ConfigError
from twostroke.kernels.limits import Limits, Shape, measured_limits
from twostroke.models.catalog import places
from twostroke.models.registry import read_spec

SCHEMA_VERSION = 1
"""Version of the JSON; it is raised when a key changes its meaning."""

BUFFER_BYTES = 512 << 20
"""Far more than caches hold."""
SHAPES: tuple[Shape, ...] = ((512, 576, 3072), (1024, 1024, 1024), (2048, 2048, 2048))
"""Rows, inputs, outputs: which is fastest differs between machines."""
COLUMNS = 120
"""A table's width where no terminal says one."""

ByThreads = dict[int, Limits]

BENCHES: dict[str, Callable[[Setting], Iterator[Result]]] = {
    "decode": bench_decode,
    "forms": bench_forms,
    "prefill": bench_prefill,
    "linear": bench_linear,
    "step": bench_step,
    "experts": bench_experts,
    "latents": bench_latents,
}


def run_session(options: KernelOptions) -> int:
    model_dir = _model_dir(options)
    for kernels in options.kernels:
        check_kernels(kernels)
    before = _limits(options)
    results = list(_results(options, model_dir))
    limits = {threads: higher(best, before[threads]) for threads, best in _limits(options).items()}
    for result in results:
        limits[result.threads] = higher(limits[result.threads], _reached(result))
    console = Console(stderr=options.json_path == STDOUT)
    if not console.is_terminal:
        console.width = COLUMNS
    for part in options.parts:
        console.print(_table(part, [result for result in results if result.part == part], limits))
    for each in limits.values():
        console.print(_described(each), highlight=False)
    write_json(as_json(options, limits, results), options.json_path)
    return 0


def higher(limits: Limits, other: Limits) -> Limits:
    """Returns the higher of both, each: what was reached once can be reached."""
    return Limits(
        limits.threads,
        max(limits.read_bytes_per_s, other.read_bytes_per_s),
        max(limits.operations_per_s, other.operations_per_s),
    )


def as_json(options: KernelOptions, limits: ByThreads, results: Sequence[Result]) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "model": options.model.model,
        "dtype": options.model.dtype,
        "weights": options.model.weights,
        "repeats": options.repeats,
        "limits": [dataclasses.asdict(each) for each in limits.values()],
        "results": [
            {
                **dataclasses.asdict(result),
                "least_s": result.work.least_s(limits[result.threads]),
                "share": result.share(limits[result.threads]),
            }
            for result in results
        ],
    }


def _limits(options: KernelOptions) -> ByThreads:
    dtype: torch.dtype = getattr(torch, options.model.dtype)
    return {
        threads: measured_limits(threads, dtype, options.repeats, buffer_bytes=BUFFER_BYTES, shapes=SHAPES)
        for threads in options.threads
    }


def _reached(result: Result) -> Limits:
    """A product may multiply faster than the one that was to show the limit. Its bytes may have come from a cache."""
    is_product = result.part == "linear"
    return Limits(result.threads, 0.0, result.work.operations / result.timed.least_s if is_product else 0.0)


def _results(options: KernelOptions, model_dir: Path) -> Iterator[Result]:
    spec = read_spec(model_dir)
    for threads in options.threads:
        for kernels in options.kernels:
            with setting_of(options.model, model_dir, spec, threads, kernels, options.repeats) as setting:
                yield from _parts(options.parts, setting)


def _parts(parts: Sequence[str], setting: Setting) -> Iterator[Result]:
    for part in parts:
        print(f"bench: {part}, {setting.kernels_name}, threads {setting.threads}", file=sys.stderr, flush=True)
        yield from BENCHES[part](setting)


def _model_dir(options: KernelOptions) -> Path:
    found = places.locate(options.model.model, options.model.dtype)
    if found is None:
        raise ConfigError(
            f"{options.model.model} in {options.model.dtype} is not on this machine; fetch it with "
            f"`twostroke model pull {options.model.model}`",
            field="model",
        )
    return found


def _described(limits: Limits) -> str:
    return (
        f"threads {limits.threads}: reads {limits.read_bytes_per_s / 1e9:.1f} GB/s, "
        f"multiplies {limits.operations_per_s / 1e9:.0f} GFLOP/s"
    )


def _table(part: str, results: Sequence[Result], limits: ByThreads) -> Table:
    table = Table(title=part, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for column in ("kernels", "threads", "ms", "from..to", "least ms", "GB/s", "GFLOP/s", "share"):
        table.add_column(column, justify="right", no_wrap=True)
    for result in results:
        found = result.timed
        table.add_row(
            result.what,
            result.kernels,
            str(result.threads),
            _ms(found.median_s),
            f"{_ms(found.least_s)}..{_ms(found.most_s)}",
            _ms(result.work.least_s(limits[result.threads])),
            f"{result.work.bytes / found.median_s / 1e9:.1f}",
            f"{result.work.operations / found.median_s / 1e9:.0f}",
            f"{result.share(limits[result.threads]):.0%}",
        )
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"
