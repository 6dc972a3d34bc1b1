"""Chooses the variant of the native kernels for this machine: the fastest in a short measurement, which is kept for
later starts.

An instruction set that a processor has need not be its fastest: one runs BF16 at half rate, another lowers its clock.
"""

from __future__ import annotations

import logging
import math
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from twostroke.base.cache_key import cache_key
from twostroke.kernels.attention.interface import RaggedBatch
from twostroke.kernels.cpu.attention import NativeAttention
from twostroke.kernels.cpu.build import Kernels, find_compiler, load_kernels, load_variant, source_key
from twostroke.kernels.cpu.linear import SERVED, NativeLinears
from twostroke.kernels.cpu.variants import (
    TORCH,
    Variant,
    chosen_variants,
    cpu_features,
    cpu_model,
    is_overridden,
)
from twostroke.kernels.kept import kept_or_measured
from twostroke.kernels.pools.page_pool import PagePool

log = logging.getLogger(__name__)

CONTENDERS: Final = 2
"""Number of variants that are measured: the preferred one and the next. A third has at most a quarter of the first
one's products per instruction, and compiling it lengthens the first start."""

CLEARLY: Final = 1.05
"""How many times as fast as the preferred variant another one must be to replace it. Smaller differences may be noise.
"""

MEASURED, ONLY_ONE, BY_FLAG = "measured", "only one", "set by the user"
NOT_BUILT, NOTHING_BUILT, NOT_KEPT = "faster ones not built", "no native kernels", "not measured"
"""Reasons for a variant. `NOT_KEPT`: the cache cannot be written, so other workers would not find what was measured."""


def choose_kernels(folder: Path) -> Kernels | None:
    """Returns the library that all workers of this machine use, built if `folder` does not have it yet; None without
    any."""
    order, reason = _in_turn(folder, chosen_variants())
    kernels = load_kernels(folder, order)
    if kernels is None:
        return None
    return replace(kernels, reason=reason if kernels.variant == order[0].name else NOT_BUILT)


def variant_and_reason(kernels: Kernels | None) -> tuple[str, str]:
    """Returns the name of what computes on the CPU, and the reason for it, where these kernels were chosen."""
    if kernels is None:
        return TORCH, BY_FLAG if is_overridden() else NOTHING_BUILT
    return kernels.variant, kernels.reason


def fastest(seconds: Mapping[str, Sequence[float]]) -> str:
    """Returns the variant with the least geometric mean of seconds for the same tasks.

    There is at least one, and the preferred one is first: it stays unless another is clearly faster.
    """
    means = {name: statistics.geometric_mean(tasks) for name, tasks in seconds.items()}
    preferred, best = next(iter(means)), min(means, key=lambda name: means[name])
    return best if means[best] * CLEARLY < means[preferred] else preferred


def _in_turn(folder: Path, able: tuple[Variant, ...]) -> tuple[tuple[Variant, ...], str]:
    """Returns all variants in the order in which to try them, and the reason for the first."""
    if is_overridden():
        return able, BY_FLAG
    contenders = tuple(variant for variant in able if variant.needs)[:CONTENDERS]
    if len(contenders) < 2:
        return able, ONLY_ONE
    try:
        kept = kept_or_measured(folder / "choice.json", _key(contenders), lambda: _measured(folder, contenders))
    except OSError as error:
        log.info("native kernels are not measured: variant=%s error=%s", able[0].name, error)
        return able, NOT_KEPT
    order = tuple(sorted(able, key=lambda variant: variant.name != kept["chosen"]))
    return order, MEASURED if len(kept["seconds"]) > 1 else ONLY_ONE


def _measured(folder: Path, contenders: Sequence[Variant]) -> dict[str, Any]:
    loaded = []
    for variant in contenders:
        try:
            loaded.append(load_variant(folder, variant))
        except (OSError, subprocess.SubprocessError) as error:
            log.warning("native kernels cannot be built: variant=%s error=%s", variant.name, error)
    if len(loaded) < 2:
        return {"chosen": contenders[0].name, "seconds": {}}
    seconds = trial_seconds(loaded)
    chosen = fastest(seconds)
    log.info("native kernels measured chosen=%s of=%s", chosen, ",".join(seconds))
    return {"chosen": chosen, "seconds": seconds}


def _key(contenders: Sequence[Variant]) -> str:
    """Returns the key of a measurement: it is valid for this kind of processor, this compiler, these sources and flags,
    and this trial."""
    try:
        compiler = find_compiler().name
    except (OSError, subprocess.SubprocessError):
        compiler = "none"
    return cache_key(
        "kernel choice",
        processor=cpu_model(),
        features=cpu_features(),
        compiler=compiler,
        contenders=[(variant.name, source_key(variant)) for variant in contenders],
    )


ROUNDS: Final = 6
"""Number of runs of each task. The first does not count, and of the others the shortest does."""

OUTPUTS, INPUTS = 4096, 1024
"""Shape of the weight: 8 MiB, which a decode step of one row reads from beyond the nearer caches."""
ROWS: Final = (1, 16, 128)
"""Rows of a product: one stream, a batch of streams, and a prompt."""

SEQUENCES, CONTEXT, BLOCK, KV_HEADS, HEAD_DIM = 8, 512, 16, 3, 64
HEADS: Final = 9
"""Number of query heads. In this trial, `SEQUENCES` streams attend to `CONTEXT` tokens each."""


def trial_seconds(loaded: Sequence[Kernels]) -> dict[str, tuple[float, ...]]:
    """Returns the seconds of each task with each variant. Variants take turns, so that all are measured under the same
    load."""
    with torch.inference_mode():
        tasks = [_tasks_of(kernels) for kernels in loaded]
        least_s = [[math.inf] * len(each) for each in tasks]
        for turn in range(ROUNDS):
            for each, least in zip(tasks, least_s, strict=True):
                for index, task in enumerate(each):
                    started_s = time.perf_counter()
                    task()
                    if turn:
                        least[index] = min(least[index], time.perf_counter() - started_s)
    return {kernels.variant: tuple(least) for kernels, least in zip(loaded, least_s, strict=True)}


def _tasks_of(kernels: Kernels) -> list[Callable[[], object]]:
    product = NativeLinears(kernels, None).linear(torch.ones(OUTPUTS, INPUTS, dtype=SERVED))
    inputs = [torch.ones(rows, INPUTS, dtype=SERVED) for rows in ROWS]
    pages = SEQUENCES * CONTEXT // BLOCK
    pool = PagePool.plain(torch.ones(pages, 1, 2, KV_HEADS, BLOCK, HEAD_DIM, dtype=SERVED))
    step = NativeAttention(pool, HEADS, HEAD_DIM**-0.5, kernels).begin(_batch(pages))
    queries = torch.ones(SEQUENCES, HEADS, HEAD_DIM, dtype=SERVED)
    return [*(lambda x=x: product(x) for x in inputs), lambda: step.attend(0, queries)]


def _batch(pages: int) -> RaggedBatch:
    """Returns a batch of the last token of every sequence."""
    tables = torch.arange(pages, dtype=torch.int32).view(SEQUENCES, -1)
    angles = torch.zeros(SEQUENCES, HEAD_DIM // 2)
    return RaggedBatch(
        positions=torch.full((SEQUENCES,), CONTEXT - 1, dtype=torch.int32),
        query_starts=tuple(range(SEQUENCES + 1)),
        context_lens=(CONTEXT,) * SEQUENCES,
        block_tables=tables,
        write_slots=tables[:, -1].long() * BLOCK + BLOCK - 1,
        cosines=angles.cos(),
        sines=angles.sin(),
    )
