"""What a soak came to. Pure."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.trials.chaos.faults.outcome import Outcome
from tests.trials.chaos.faults.report import Facts, markdown
from tests.trials.chaos.injection.plan import Kind
from tests.trials.chaos.soak.memory import WARM_UP_S, Memory, most_bytes, most_files
from tools.simulate.fleet.results import percentile

SCHEMA_VERSION = 1
"""Version of the JSON; it is raised when a key changes its meaning."""
MIB = 1 << 20


@dataclass(slots=True)
class Course:
    clusters: int = 0
    """More than one: something did not come back."""
    outcomes: list[Outcome] = field(default_factory=list)
    quiet_streams: int = 0
    """Between faults."""
    wrong: list[str] = field(default_factory=list)
    """Undisturbed streams that were wrong."""
    memories: list[Memory] = field(default_factory=list)
    """Memory of each cluster."""

    @property
    def streams(self) -> int:
        return self.quiet_streams + sum(outcome.streams for outcome in self.outcomes)

    @property
    def happened(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.has_happened]

    def misses(self) -> list[str]:
        lossy = [f"{outcome.trial}: {outcome.verdict}" for outcome in self.outcomes if outcome.is_lossy]
        return [*lossy, *self.wrong, *(miss for memory in self.memories for miss in memory.misses())]

    def line(self) -> str:
        """How things are."""
        largest = {
            kind: most_bytes([process for process in processes if process.samples])
            for memory in self.memories[-1:]
            for kind, processes in memory.by_kind().items()
        }
        sizes = ", ".join(f"{kind} {size / MIB:.0f}" for kind, size in sorted(largest.items()))
        return (
            f"{len(self.happened)} faults, {self.streams} streams, {len(self.misses())} misses; "
            f"largest so far, MiB: {sizes}"
        )


def summary(course: Course, facts: Facts) -> str:
    """For people at a terminal."""
    lines = [f"soak of {facts.duration_s / 60:.0f} min, seed {facts.seed}: {course.line()}"]
    return "\n".join([*lines, *(f"  MISS {miss}" for miss in course.misses())])


def written(course: Course, facts: Facts) -> str:
    """The section of docs/faults.md."""
    heading = (
        f"Seed {facts.seed}, {facts.date}, twostroke {facts.version}, Ray {facts.ray}, Python {facts.python}; "
        f"{facts.machine}. `{facts.model}`, {facts.dtype}. {facts.duration_s / 60:.0f} minutes: "
        f"{len(course.happened)} faults, {course.streams} streams, {len(course.misses())} misses."
    )
    misses = "\n".join(f"- **{miss}**" for miss in course.misses())
    parts = filter(None, (heading, _faults(course), _memory(course), misses))
    return "\n\n".join(parts)


def _faults(course: Course) -> str:
    counts = Counter((outcome.trial.process, outcome.trial.kind) for outcome in course.happened)
    rows = []
    for kind in Kind:
        its = [outcome for outcome in course.happened if outcome.trial.kind is kind]
        waits = [outcome.recovery_s for outcome in its if outcome.recovery_s is not None]
        if not its:
            continue
        where = ", ".join(f"{process} {count}" for (process, of), count in sorted(counts.items()) if of is kind)
        rows.append(
            [
                kind.value,
                str(len(its)),
                where,
                str(sum(outcome.streams for outcome in its)),
                *(f"{percentile(waits, share):.2f}" if waits else "" for share in (0.5, 0.99, 1.0)),
            ]
        )
    return markdown(["kind", "faults", "in", "streams", "next token p50, s", "p99", "max"], rows)


def _memory(course: Course) -> str:
    rows = []
    for kind in sorted({kind for memory in course.memories for kind in memory.by_kind()}):
        processes = [process for memory in course.memories for process in memory.by_kind().get(kind, [])]
        slopes = [process.bytes_per_s * 3600 / MIB for process in processes if process.is_telling]
        rows.append(
            [
                kind,
                str(len(processes)),
                f"{most_bytes(processes) / MIB:.0f}",
                str(len(slopes)),
                f"{max(slopes):+.1f}" if slopes else "",
                str(most_files(processes)),
            ]
        )
    table = markdown(
        ["process", "starts", "largest, MiB", "long runs", "worst trend, MiB/h", "most open files"],
        rows,
    )
    warm_up = f"their first {WARM_UP_S / 60:.0f} minutes"
    return f"Memory; trends are of what processes that ran long did after {warm_up}.\n\n{table}"


def as_json(course: Course, facts: Facts) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        **dataclasses.asdict(facts),
        "clusters": course.clusters,
        "streams": course.streams,
        "misses": course.misses(),
        "outcomes": [
            {**dataclasses.asdict(outcome), "trial": str(outcome.trial), "verdict": outcome.verdict}
            for outcome in course.outcomes
        ],
        "memory": [dataclasses.asdict(memory) for memory in course.memories],
    }
