"""What a trial has to keep to, and the table of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from tests.trials.chaos.neighbours.entries import ENTRIES
from tests.trials.chaos.neighbours.honest import Seen
from tests.trials.chaos.neighbours.trial import Trial, answers, percentile

MOST_TIMES = 3.0
"""The honest client's p99 beside a hostile one, over its p99 without."""
MOST_LIVE_S = 0.1
POOLED = 12
"""Baselines that count together, the last ones: one of a few seconds has too few answers for a p99."""


@dataclass(frozen=True, slots=True)
class Bounds:
    answer_s: float
    live_s: float


def bounds_of(baselines: Sequence[Seen]) -> Bounds:
    """For a trial after `baselines`."""
    pooled = Seen({"http": [], "grpc": [], "live": []})
    for each in baselines[-POOLED:]:
        pooled = pooled.merged(each)
    return Bounds(MOST_TIMES * percentile(answers(pooled), 0.99), MOST_LIVE_S)


def misses(trial: Trial, bounds: Bounds) -> list[str]:
    """What is not as it must be; empty: nothing."""
    said = list(trial.left)
    if trial.seen.errors:
        said.append(f"{len(trial.seen.errors)} errors: {trial.seen.errors[0]}")
    if trial.answer_s(0.99) > bounds.answer_s:
        said.append(f"answers p99 {_ms(trial.answer_s(0.99))}, bound {_ms(bounds.answer_s)}")
    if trial.live_s(0.99) > bounds.live_s:
        said.append(f"/live p99 {_ms(trial.live_s(0.99))}, bound {_ms(bounds.live_s)}")
    if not trial.sent:
        said.append("the hostile client sent nothing")
    return said


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"


@dataclass(frozen=True, slots=True)
class Row:
    site: str
    entry: str
    sent: int
    base_p50_ms: float
    base_p99_ms: float
    p50_ms: float
    p99_ms: float
    live_p99_ms: float
    errors: int
    more_mb: float
    misses: list[str]

    @property
    def is_good(self) -> bool:
        return not self.misses


def row_of(site: str, trial: Trial, baselines: Sequence[Seen]) -> Row:
    bounds = bounds_of(baselines)
    quiet = [seconds for each in baselines[-POOLED:] for seconds in answers(each)]
    return Row(
        site=site,
        entry=trial.entry,
        sent=trial.sent,
        base_p50_ms=round(percentile(quiet, 0.5) * 1000, 1),
        base_p99_ms=round(percentile(quiet, 0.99) * 1000, 1),
        p50_ms=round(trial.answer_s(0.5) * 1000, 1),
        p99_ms=round(trial.answer_s(0.99) * 1000, 1),
        live_p99_ms=round(trial.live_s(0.99) * 1000, 1),
        errors=len(trial.seen.errors),
        more_mb=round(trial.more_mb, 1),
        misses=misses(trial, bounds),
    )


def as_json(rows: Sequence[Row]) -> str:
    return "\n".join(json.dumps({name: getattr(row, name) for name in Row.__slots__}) for row in rows)  # type: ignore[attr-defined]


def as_table(rows: Sequence[Row]) -> str:
    """Markdown; of entries that were played more than once, the worst time."""
    worst: dict[tuple[str, str], Row] = {}
    for row in rows:
        before = worst.get((row.site, row.entry))
        if before is None or (len(row.misses), row.p99_ms) > (len(before.misses), before.p99_ms):
            worst[row.site, row.entry] = row
    lines = [
        "| server | port | hostile client | sent | answers p50, p99 ms (baseline) | /live p99 ms | errors | MB more | |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for (site, name), row in sorted(worst.items()):
        timed = f"{row.p50_ms:.0f}, {row.p99_ms:.0f} ({row.base_p50_ms:.0f}, {row.base_p99_ms:.0f})"
        cells = [site, ENTRIES[name].port, name, str(row.sent), timed, f"{row.live_p99_ms:.0f}", str(row.errors)]
        lines.append(f"| {' | '.join([*cells, f'{row.more_mb:.0f}', '; '.join(row.misses) or 'holds'])} |")
    return "\n".join(lines)
