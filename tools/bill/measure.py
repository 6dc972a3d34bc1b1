"""This machine, as the bill needs it: bytes read per second, seconds to compute a page, and to copy one from a tier."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from tools.bill.model import BilledModel
from twostroke.base.errors import ConfigError
from twostroke.config import Role, RuntimeConfig, ScheduleConfig, WorkerConfig
from twostroke.engine.build import build_runner
from twostroke.engine.loop import EngineThread
from twostroke.kernels.kept import kept
from twostroke.kv_cache.memory import available_memory_bytes
from twostroke.kv_cache.tiers.record import record_bytes
from twostroke.models.catalog.places import cache_dir, locate
from twostroke.scheduler.cost import StepCost
from twostroke.transfer.base import digest
from twostroke.worker.measured.machine_limits import LIMITS_FILE, kept_limits, limits_key
from twostroke.worker.measured.rates import Rates
from twostroke.worker.steps.calibration import (
    MANY_STREAMS,
    CalibrationLimits,
    SweepBudget,
    calibrate,
    step_tokens_within,
)

BUDGET: Final = SweepBudget(2.0, warms_up=True)
COPIED_BYTES: Final = 256 << 20
"""Bytes of pages that are copied: more than most caches hold."""
LEAST_PAGES, MOST_PAGES = 16, 2048
REPEATS: Final = 3
NAME: Final = "twostroke-bill-"


@dataclass(frozen=True, slots=True)
class TierCost:
    """Bringing pages up from one tier, digests checked."""

    tier: str
    first_s: float
    """Seconds until the first page is there."""
    page_s: float
    """Seconds of each page in a run of them."""

    def load_s(self, pages: int) -> float:
        return self.first_s + max(0, pages - 1) * self.page_s


@dataclass(frozen=True, slots=True)
class ComputeCost:
    """Computing a prompt's pages."""

    cost: StepCost
    step_tokens: int
    block_size: int

    def compute_s(self, pages: int) -> float:
        """Returns the seconds for the first pages of a prompt, with nothing else to run."""
        return self.cost.of_prompt(pages * self.block_size, 0, self.step_tokens)


def break_even_pages(tier: TierCost, compute: ComputeCost, most_pages: int) -> int | None:
    """Returns the shortest prefix, in pages, that is loaded sooner than computed; None where none of them is."""
    return next((pages for pages in range(1, most_pages + 1) if tier.load_s(pages) < compute.compute_s(pages)), None)


@dataclass(frozen=True, slots=True)
class MachineCosts:
    """What was measured of this machine."""

    compute: ComputeCost | None
    """None for a paced model, which computes nothing."""
    tiers: tuple[TierCost, ...]


def known_bandwidth(model: BilledModel) -> float | None:
    """Returns the bytes per second that one worker can read: as said, or as this machine was measured; else None."""
    flags = model.flags
    if flags.machine.bandwidth is not None:
        return flags.machine.bandwidth * 1e9
    if flags.memory.device_memory_bytes is not None:
        return None
    config = _config(model)
    if flags.machine.measure and not flags.model.is_paced:
        return kept_limits(cache_dir(), config, lambda call: call()).read_bytes_per_s
    found = kept(cache_dir() / LIMITS_FILE, limits_key(config))
    return None if found is None else float(found["read_bytes_per_s"])


def measured(model: BilledModel, page_bytes: int, longest_bytes: int) -> MachineCosts:
    """Measures what computing pages and loading them takes. Raises ConfigError where the model or the disk cannot.

    `longest_bytes`: what the pages of the longest request take, as the model computes them.
    """
    flags, tiers = model.flags, [host_cost(page_bytes)]
    if flags.machine.disk_cache_dir is not None:
        tiers.append(disk_cost(Path(flags.machine.disk_cache_dir), page_bytes))
    return MachineCosts(None if flags.model.is_paced else _compute_cost(model, longest_bytes), tuple(tiers))


def _config(model: BilledModel, pool_bytes: int | None = None) -> WorkerConfig:
    """Returns the config of a worker on this machine's CPU."""
    config = model.config(Role.PREFILL, kv_cache_memory_bytes=pool_bytes)
    runtime = RuntimeConfig(threads=model.flags.machine.threads)
    return config.replace(model=config.model.replace(device="cpu"), runtime=runtime)


def _compute_cost(model: BilledModel, longest_bytes: int) -> ComputeCost:
    """Loads the model and runs some steps, as a worker does when it starts."""
    flags = model.flags
    directory = locate(flags.model.model, flags.model.dtype)
    if directory is None:
        raise ConfigError(
            f"--measure loads the model, and {flags.model.model!r} is not on this machine; run: "
            f"twostroke model pull {flags.model.model}",
            field="measure",
        )
    needed_bytes = 0 if flags.model.max_model_len is None else longest_bytes  # a length said by name must fit
    built = build_runner(_config(model, max(needed_bytes, _trial_pool_bytes())), directory)
    engine = EngineThread(built.runner)
    try:
        step_tokens = ScheduleConfig(max_num_seqs=flags.model.max_num_seqs).step_tokens()
        limits = CalibrationLimits(
            step_tokens=step_tokens,
            max_model_len=built.model.max_model_len,
            max_sequences=MANY_STREAMS,
            pages=built.model.pages,
            block_size=built.model.block_size,
            runs_decode=False,
        )
        rates = Rates()
        asyncio.run(calibrate(engine, rates, limits, BUDGET))
    finally:
        engine.close()
        built.memory.close()
    cost: StepCost = rates.cost
    return ComputeCost(cost, step_tokens_within(cost, step_tokens), flags.memory.block_size)


def _trial_pool_bytes() -> int:
    return min(COPIED_BYTES, available_memory_bytes() // 4)


def host_cost(page_bytes: int) -> TierCost:
    """Copies pages from one part of the host's memory to another, in no order, with their digests."""
    pages = _pages(page_bytes)
    source = np.random.default_rng(1).integers(0, 256, (pages, page_bytes), np.uint8)
    target = np.zeros_like(source)
    digests = [digest(page) for page in source]

    def copy(page: int) -> None:
        target[page] = source[page]
        assert digest(target[page]) == digests[page]

    return _cost("host", pages, copy)


def disk_cost(folder: Path, page_bytes: int) -> TierCost:
    """Writes pages into a file of the folder, and reads them back in no order, past the system's cache if that works.

    Raises ConfigError where the folder's disk does not take them.
    """
    size = record_bytes(page_bytes)
    pages = _pages(size)
    content = np.random.default_rng(2).integers(0, 256, (pages, size), np.uint8)
    digests = [digest(record) for record in content]
    try:
        with _file_of(folder, content.data) as descriptor, contextlib.closing(mmap.mmap(-1, size)) as buffer:

            def read(page: int) -> None:
                assert os.preadv(descriptor, [buffer], page * size) == size
                assert digest(memoryview(buffer)) == digests[page]

            return _cost("disk", pages, read, repeats=1)  # what was read once may be cached somewhere
    except OSError as error:
        raise ConfigError(f"--disk-cache-dir {folder}: {error.strerror}", field="disk_cache_dir") from error


@contextlib.contextmanager
def _file_of(folder: Path, content: memoryview) -> Iterator[int]:
    """Yields a descriptor that reads the content from the disk. The file is gone afterwards."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=NAME, buffering=0) as file:
        flat = content.cast("B")
        written = 0
        while written < len(flat):
            written += os.write(file.fileno(), flat[written:])
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            descriptor = os.open(file.name, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:  # the file system has no direct I/O
            descriptor = os.open(file.name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def _pages(page_bytes: int) -> int:
    return max(LEAST_PAGES, min(MOST_PAGES, _trial_pool_bytes() // page_bytes))


def _cost(tier: str, pages: int, move: Callable[[int], None], repeats: int = REPEATS) -> TierCost:
    """Times single pages: the slowest tenth is what the first one may take, the best round what each takes in a run."""
    order = list(range(pages))
    singles: list[float] = []
    rounds: list[float] = []
    for _ in range(repeats):
        random.Random(3).shuffle(order)
        for page in order:
            started_s = time.perf_counter()
            move(page)
            singles.append(time.perf_counter() - started_s)
        rounds.append(sum(singles[-pages:]) / pages)
    return TierCost(tier, sorted(singles)[9 * len(singles) // 10], min(rounds))
