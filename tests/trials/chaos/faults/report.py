"""What docs/faults.md says of a run. Pure, but for `Facts.now`."""

from __future__ import annotations

import functools
import os
import platform
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata

from tests.trials.chaos.faults.bounds import overruns
from tests.trials.chaos.faults.outcome import Drafts, Outcome, PoolRest, is_stale
from tests.trials.chaos.faults.trials import ANYWHERE, HEAD
from tests.trials.chaos.injection.plan import Kind
from tests.trials.chaos.injection.points import Cell, Process, why_not
from tests.trials.chaos.program import ClusterOptions
from tools.simulate.fleet.results import percentile
from twostroke.base.fault_points import Point

SHARES = (0.5, 0.99)
DRAFTING_S = 0.5
"""A worker that has run drafted tokens within it is drafting: a step of a small model takes some milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts of a run."""

    seed: int
    model: str
    dtype: str
    breaks: str | None
    version: str
    ray: str
    python: str
    machine: str
    date: str
    duration_s: float

    @classmethod
    def now(cls, options: ClusterOptions, duration_s: float) -> Facts:
        return cls(
            seed=options.seed,
            model=" ".join(options.model_flags),
            dtype=options.dtype,
            breaks=options.breaks,
            version=metadata.version("twostroke"),
            ray=metadata.version("ray"),
            python=platform.python_version(),
            machine=f"{os.cpu_count()} cores, {platform.system()} {platform.release()}, {platform.machine()}",
            date=time.strftime("%Y-%m-%d"),
            duration_s=duration_s,
        )


def summary(outcomes: Sequence[Outcome], facts: Facts) -> str:
    """For people at a terminal."""
    misses = [outcome for outcome in outcomes if outcome.is_miss]
    late, notes = overruns(outcomes)
    lines = [
        f"{len(outcomes)} faults in {facts.duration_s / 60:.1f} min, seed {facts.seed}: {_streams(outcomes)}, "
        f"{len(misses) + len(late)} misses",
        *(f"  {name}: {text}" for name, text in _waits(outcomes).items()),
        *(f"  {note}" for note in (_zombies(outcomes), *notes) if note),
        *(f"  MISS {outcome.trial}: {outcome.verdict}" for outcome in misses),
        *(f"  MISS {overrun}" for overrun in late),
    ]
    return "\n".join(lines)


def written(outcomes: Sequence[Outcome], facts: Facts, rests: Sequence[PoolRest], *, is_whole: bool) -> str:
    """Returns a section of docs/faults.md. That of the whole matrix says why cells are empty."""
    parts = [
        _heading(outcomes, facts),
        _table(outcomes),
        _waits_table(outcomes),
        _zombies(outcomes),
        _refusals(outcomes),
        _drafts(outcomes),
        _rests(rests),
        _misses(outcomes),
    ]
    if is_whole:
        parts.append(_reasons())
    return "\n\n".join(filter(None, parts))


def _heading(outcomes: Sequence[Outcome], facts: Facts) -> str:
    points = {outcome.trial.point for outcome in outcomes if outcome.has_happened} - {ANYWHERE}
    return (
        f"Seed {facts.seed}, {facts.date}, twostroke {facts.version}, Ray {facts.ray}, Python {facts.python}; "
        f"{facts.machine}. `{facts.model}`, {facts.dtype}. {len(outcomes)} faults at {len(points)} points in "
        f"{facts.duration_s / 60:.0f} minutes; {_streams(outcomes)}; "
        f"{sum(outcome.resumed for outcome in outcomes)} went on at another router."
    )


def _streams(outcomes: Sequence[Outcome]) -> str:
    total = sum(outcome.streams for outcome in outcomes)
    return f"{total - sum(len(outcome.wrong) for outcome in outcomes)} of {total} streams identical"


def _table(outcomes: Sequence[Outcome]) -> str:
    kinds = [kind for kind in Kind if any(outcome.trial.kind is kind for outcome in outcomes)]
    by_trial: dict[tuple[str, str, Kind], list[Outcome]] = {}
    for outcome in outcomes:
        trial = outcome.trial
        by_trial.setdefault((trial.process, trial.point, trial.kind), []).append(outcome)
    rows = [
        [process, point, *(_cell(by_trial.get((process, point, kind), [])) for kind in kinds)]
        for process, point in _rows(outcomes)
    ]
    return markdown(["process", "point", *kinds], rows)


def _rows(outcomes: Sequence[Outcome]) -> list[tuple[str, str]]:
    """In the order of a request's life."""
    points = [*(point.value for point in Point), ANYWHERE]
    processes = [*(process.value for process in Process), HEAD]
    rows = {(outcome.trial.process, outcome.trial.point) for outcome in outcomes}
    return sorted(rows, key=lambda row: (processes.index(row[0]), points.index(row[1])))


def _cell(outcomes: Sequence[Outcome]) -> str:
    if not outcomes:
        return ""
    if not all(outcome.has_happened for outcome in outcomes):
        return "**not reached**"
    total = sum(outcome.streams for outcome in outcomes)
    right = total - sum(len(outcome.wrong) for outcome in outcomes)
    waits = [outcome.recovery_s for outcome in outcomes if outcome.recovery_s is not None]
    text = f"{right}/{total}" + (f" {max(waits):.2f} s" if waits else "")
    return f"**{text}**" if any(outcome.is_miss for outcome in outcomes) else text


def _waits(outcomes: Sequence[Outcome]) -> dict[str, str]:
    """Recovery, by process and kind, where the next token may take a while."""
    found: dict[str, list[float]] = {}
    for outcome in outcomes:
        if outcome.recovery_s is not None:
            found.setdefault(f"{outcome.trial.kind} {outcome.trial.process}", []).append(outcome.recovery_s)
            found.setdefault(f"{outcome.trial.kind}", []).append(outcome.recovery_s)
    return {
        name: "next token after "
        + ", ".join(
            [*(f"p{100 * share:g} {percentile(waits, share):.2f} s" for share in SHARES), f"max {max(waits):.2f} s"]
        )
        + f" ({len(waits)})"
        for name, waits in sorted(found.items())
    }


def _waits_table(outcomes: Sequence[Outcome]) -> str:
    found: dict[tuple[Kind, str], list[float]] = {}
    for outcome in outcomes:
        if outcome.recovery_s is not None:
            for process in (outcome.trial.process, "all"):
                found.setdefault((outcome.trial.kind, process), []).append(outcome.recovery_s)
    order = [*(process.value for process in Process), HEAD, "all"]
    rows = [
        [
            kind,
            process,
            str(len(waits)),
            *(f"{percentile(waits, share):.2f}" for share in SHARES),
            f"{max(waits):.2f}",
        ]
        for (kind, process), waits in sorted(
            found.items(), key=lambda entry: (list(Kind).index(entry[0][0]), order.index(entry[0][1]))
        )
    ]
    title = "Recovery: seconds from the fault to the next token of the stream that waited longest."
    return f"{title}\n\n" + markdown(["kind", "process", "faults", "p50", "p99", "max"], rows)


def _refusals(outcomes: Sequence[Outcome]) -> str:
    counted: dict[str, int] = {}
    for outcome in outcomes:
        for name, count in outcome.refused.items():
            counted[name] = counted.get(name, 0) + count
    listed = ", ".join(f"`{name}` {count}" for name, count in sorted(counted.items()))
    return f"Refused meanwhile, by counter: {listed}." if listed else ""


def _zombies(outcomes: Sequence[Outcome]) -> str:
    tried = [outcome for outcome in outcomes if outcome.met is not None]
    if not tried:
        return ""
    alone = ", ".join(str(outcome.trial) for outcome in tried if not outcome.met)
    counted = Counter[str]()
    for outcome in tried:
        counted.update({name: count for name, count in outcome.refused.items() if is_stale(name)})
    return (
        f"{sum(bool(outcome.met) for outcome in tried)} of {len(tried)} that were frozen or cut off under a long "
        f"stream came back while it went on elsewhere{f' (not: {alone})' if alone else ''}; refused in these: "
        f"{', '.join(f'`{name}` {count}' for name, count in sorted(counted.items())) or 'nothing'}."
    )


def _drafts(outcomes: Sequence[Outcome]) -> str:
    total = functools.reduce(Drafts.plus, (outcome.drafts for outcome in outcomes), Drafts())
    if not total.run:
        return ""
    happened = [outcome for outcome in outcomes if outcome.has_happened]
    fresh = [each for each in happened if each.draft_age_s is not None and each.draft_age_s < DRAFTING_S]
    others = ", ".join(str(each.trial) for each in happened if each not in fresh)
    return (
        f"Tokens of the draft model meanwhile: {total.run} run, {total.kept} kept, without what workers that died had "
        f"counted. In {len(fresh)} of {len(happened)} faults the broken worker had run some of them less than "
        f"{DRAFTING_S:g} s before{f' (not: {others})' if others else ''}."
    )


def _rests(rests: Sequence[PoolRest]) -> str:
    """Returns the table of pages; empty where one rank and one model have them, as in most runs."""
    shared = [rest for rest in rests if rest.ranks > 1 or rest.drafting is not None]
    if not shared:
        return ""
    rows = [
        [
            rest.worker,
            *map(str, (rest.ranks, rest.total, rest.free, rest.cached, rest.pinned, rest.leaked)),
            _held(rest),
        ]
        for rest in rests
    ]
    title = "Pages when all faults were over and nobody asked anything"
    each = "; each rank has its range of heads of every page" if any(rest.ranks > 1 for rest in rests) else ""
    headings = ["worker", "ranks", "pages", "free", "cached", "pinned", "leaked", "held by drafts"]
    return f"{title}{each}.\n\n" + markdown(headings, rows)


def _held(rest: PoolRest) -> str:
    return "" if rest.drafting is None else str(rest.drafting)


def _misses(outcomes: Sequence[Outcome]) -> str:
    late, notes = overruns(outcomes)
    lossy = [f"- **{outcome.trial}**: {outcome.verdict}" for outcome in outcomes if outcome.is_miss]
    return "\n".join([*lossy, *(f"- **{overrun}**" for overrun in late), *(f"- {note}" for note in notes)])


def _reasons() -> str:
    """Why cells are empty: one row for each reason, with the cells that it empties."""
    by_reason: dict[str, list[Cell]] = {}
    for process in Process:
        for point in Point:
            for kind in Kind:
                cell = Cell(process, point, kind)
                reason = why_not(cell)
                if reason is not None and not reason.startswith("a "):
                    by_reason.setdefault(reason, []).append(cell)
    rows = [[reason, _names(c.kind for c in cells), _places(cells)] for reason, cells in by_reason.items()]
    rows.append(["Ray's head has no points of ours and carries neither tokens nor pages", "others", HEAD])
    return "Why cells are empty (and no process comes to another's points):\n\n" + markdown(
        ["because", "kinds", "at"], rows
    )


def _names(kinds: Iterable[Kind]) -> str:
    named = set(kinds)
    return ", ".join(kind for kind in Kind if kind in named)


def _places(cells: Sequence[Cell]) -> str:
    """Returns the points by their first word, where all points with it are meant."""
    points = {cell.point for cell in cells}
    words = list(dict.fromkeys(_word(point) for point in Point if point in points))
    return ", ".join(
        f"{word}.*"
        if all(point in points for point in Point if _word(point) == word)
        else ", ".join(point for point in Point if point in points and _word(point) == word)
        for word in words
    )


def _word(point: Point) -> str:
    return point.partition(".")[0]


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(headings) + " |", "|" + " --- |" * len(headings)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
