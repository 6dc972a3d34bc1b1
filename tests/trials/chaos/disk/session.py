"""One cluster after the other, each with one fault of its disk; progress, verdict, JSON and the table."""

from __future__ import annotations

import asyncio
import dataclasses
import fnmatch
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.trials.chaos.disk.bed import disk_bed
from tests.trials.chaos.disk.chats import Turn
from tests.trials.chaos.disk.faults import FAULTS, DiskFault, Seen
from tests.trials.chaos.disk.options import DiskOptions
from tests.trials.chaos.faults.report import markdown
from twostroke.base.errors import ConfigError

SCHEMA_VERSION = 1
"""Version of the JSON; it is raised when a key changes its meaning."""


@dataclass(frozen=True, slots=True)
class DiskOutcome:
    name: str
    tried: str
    seen: Seen
    took_s: float

    @property
    def is_good(self) -> bool:
        return not self.seen.problem


def run_session(options: DiskOptions) -> int:
    """Returns the exit status: 1 if an answer differed, or a fault had no effect."""
    wanted = [
        fault for fault in FAULTS if not options.only or any(fnmatch.fnmatch(fault.name, each) for each in options.only)
    ]
    if not wanted:
        raise ConfigError(f"--only: there is no such fault; there are {', '.join(each.name for each in FAULTS)}")
    outcomes = asyncio.run(run_faults(wanted, options.model, options.dtype))
    good = sum(each.is_good for each in outcomes)
    options.report.tell(f"{good} of {len(outcomes)} faults of the disk did no harm", _as_json(options, outcomes))
    options.report.publish(_written(options, outcomes))
    return 0 if good == len(outcomes) else 1


async def run_faults(wanted: Sequence[DiskFault], model: str, dtype: str) -> list[DiskOutcome]:
    """Tries every fault in a cluster of its own."""
    with tempfile.TemporaryDirectory(prefix="tsd-") as folder:
        async with disk_bed(model, dtype, Path(folder), has_disk=False) as plain:
            baseline = await plain.talk()
    outcomes: list[DiskOutcome] = []
    for fault in wanted:
        outcomes.append(await _one(fault, model, dtype, baseline))
        each = outcomes[-1]
        print(
            f"disk: {each.name}: {each.seen.identical} of {each.seen.streams} identical; {each.seen.text}, "
            f"{each.took_s:.1f} s: {each.seen.problem or 'ok'}",
            file=sys.stderr,
            flush=True,
        )
    return outcomes


async def _one(fault: DiskFault, model: str, dtype: str, baseline: Sequence[Turn]) -> DiskOutcome:
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tsd-") as folder:
        async with disk_bed(model, dtype, Path(folder)) as bed:
            seen = await fault.deed(bed, baseline)
            bed.disk()
    return DiskOutcome(fault.name, fault.tried, seen, time.monotonic() - began_s)


def _as_json(options: DiskOptions, outcomes: Sequence[DiskOutcome]) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "model": options.model,
        "dtype": options.dtype,
        "outcomes": [dataclasses.asdict(each) for each in outcomes],
    }


def _written(options: DiskOptions, outcomes: Sequence[DiskOutcome]) -> str:
    """Returns the section of docs/faults.md."""
    rows = [
        [
            each.name,
            each.tried,
            f"{each.seen.identical}/{each.seen.streams}",
            each.seen.text + (f"; **{each.seen.problem}**" if each.seen.problem else ""),
            f'`--only "{each.name}"`',
        ]
        for each in outcomes
    ]
    heading = (
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, {platform.system()} {platform.release()}. "
        f"`{options.model}`, {options.dtype}."
    )
    return f"{heading}\n\n" + markdown(["fault", "tried", "identical", "seen", "again with"], rows)
