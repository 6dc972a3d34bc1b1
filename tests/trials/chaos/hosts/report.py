"""The table of docs/multi-host.md. Pure, but for `Facts.now`."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

from tests.trials.chaos.faults.report import markdown
from tests.trials.chaos.hosts.result import Result

HEADINGS = (
    "what happens",
    "run",
    "host",
    "streams",
    "open then",
    "identical",
    "next token after",
    "allowed",
    "later streams' tokens after",
    "all serve after",
    "old epoch ends after return",
    "stale, refused",
    "verdict",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts of a session."""

    before: str
    """What was true before anything was broken."""
    machine: str
    date: str
    duration_s: float
    load: float

    @classmethod
    def now(cls, before: str, duration_s: float) -> Facts:
        return cls(
            before=before,
            machine=f"twostroke {metadata.version('twostroke')}, Ray {metadata.version('ray')}, Python "
            f"{platform.python_version()}; {os.cpu_count()} cores, {platform.system()} {platform.release()}",
            date=time.strftime("%Y-%m-%d"),
            duration_s=duration_s,
            load=os.getloadavg()[2],
        )


def written(results: Sequence[Result], facts: Facts) -> str:
    total = sum(result.streams for result in results)
    right = total - sum(len(result.wrong) for result in results)
    turned = sum(len(result.turned) for result in results)
    problems = [result for result in results if result.problems]
    heading = (
        f"{facts.date}, {facts.machine}. {facts.before} {len(results)} faults in {facts.duration_s / 60:.0f} minutes "
        f"(load average at the end, over 15 minutes: {facts.load:.1f}); {right} of {total} streams identical, "
        f"{turned} clients had to turn to another router, {len(problems)} with something wrong."
    )
    rows = [_row(result) for result in sorted(results, key=_order(results))]
    misses = [f"- **{result.fault}**, run {result.run}: {'; '.join(result.problems)}" for result in problems]
    return "\n\n".join(filter(None, [heading, markdown(HEADINGS, rows), "\n".join(misses)]))


def _order(results: Sequence[Result]) -> _ByFault:
    return _ByFault([result.fault for result in results])


@dataclass(frozen=True, slots=True)
class _ByFault:
    """Runs of the same fault beside each other, faults as they came."""

    faults: Sequence[str]

    def __call__(self, result: Result) -> tuple[int, int]:
        return self.faults.index(result.fault), result.run


def _row(result: Result) -> list[str]:
    return [
        result.fault,
        str(result.run),
        result.host,
        str(result.streams),
        str(result.open_streams),
        str(result.streams - len(result.wrong)),
        _seconds(result.recovery_s, 2),
        _seconds(result.bound_s, 0),
        _seconds(result.later_s, 2),
        _seconds(result.capacity_s, 1),
        _seconds(result.fenced_s, 1),
        str(result.stale),
        result.verdict,
    ]


def _seconds(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f} s"
