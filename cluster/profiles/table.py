"""A profile as a table: what the steps of each worker spent their time on. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cluster.profiles.collecting import ProcessProfile, kernels_of
from twostroke.observability.profiler import ENGINE, WORK_LOOP

STEP, FORWARD = "step", "forward"
REST = "rest of step"
PARTS = {"prepare": REST, FORWARD: REST, "sample": REST, "build batch": "plan"}
"""Slices that lie within another one, and the part that it counts as."""


@dataclass(slots=True)
class _Sum:
    seconds: float = 0.0
    bytes: float = 0.0
    operations: float = 0.0
    least_s: float = 0.0


def lines_of(profiles: Sequence[ProcessProfile]) -> Iterator[str]:
    for profile in sorted(profiles, key=lambda profile: profile.name):
        if profile.failure:
            yield f"{profile.name}: {profile.failure}"
        elif profile.about.role != "router":
            yield from _worker(profile)
        if profile.about.dropped:
            yield f"{profile.name}: the latest are kept, {profile.about.dropped} slices, kernels and spans are not"


def _worker(profile: ProcessProfile) -> Iterator[str]:
    steps = [piece for piece in profile.slices if (piece.track, piece.name) == (ENGINE, STEP)]
    busy_s = sum(piece.end_ns - piece.start_ns for piece in steps) / 1e9
    rows = sum(piece.facts["rows"] for piece in steps)
    yield (
        f"{profile.name}: {len(steps)} steps, {busy_s:.3f} of {profile.seconds:.1f} s"
        + (f", {busy_s / len(steps) * 1e3:.2f} ms and {rows / len(steps):.1f} rows each" if steps else "")
    )
    if not steps:
        return
    yield f"  {'part':<16}{'of steps':>9}{'ms/step':>9}{'GB/s':>8}{'GFLOP/s':>9}{'of limit':>10}"
    for name, total in sorted(sums_of(profile).items(), key=lambda part: -part[1].seconds):
        rates = ""
        if total.bytes:
            limit = f"{total.least_s / total.seconds:.0%}" if total.least_s else ""
            rates = (
                f"{total.bytes / total.seconds / 1e9:>8.1f}{total.operations / total.seconds / 1e9:>9.0f}{limit:>10}"
            )
        yield f"  {name:<16}{total.seconds / busy_s:>9.1%}{total.seconds / len(steps) * 1e3:>9.3f}{rates}"
    for name, total in sums_of(profile, WORK_LOOP).items():
        yield f"  {name:<16}{'beside':>9}{total.seconds / len(steps) * 1e3:>9.3f}"


def sums_of(profile: ProcessProfile, track: str = ENGINE) -> dict[str, _Sum]:
    """Returns the parts of a track's time, which add up to it: kernels by name, and what is none."""
    sums: dict[str, _Sum] = defaultdict(_Sum)
    for piece in profile.slices:
        if piece.track != track:
            continue
        seconds = (piece.end_ns - piece.start_ns) / 1e9
        sums[REST if piece.name == STEP else piece.name].seconds += seconds
        if (around := PARTS.get(piece.name)) is not None:
            sums[around].seconds -= seconds
        for kernel in kernels_of(piece):
            seconds = (kernel.end_ns - kernel.start_ns) / 1e9
            total = sums[kernel.name]
            total.seconds += seconds
            total.bytes += kernel.bytes
            total.operations += kernel.operations
            total.least_s += (profile.share_of_limit(kernel) or 0.0) * seconds
            sums[piece.name].seconds -= seconds
    return dict(sums)
