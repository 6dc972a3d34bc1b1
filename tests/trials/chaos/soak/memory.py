"""How much the processes of a cluster hold, from start to end. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

WARM_UP_S = 120.0
"""Seconds of a process in which caches, pools and allocators fill."""
LEAST_S = 240.0
"""Time of a process after which its growth can be told."""
GROWTH_BYTES = 24 << 20
"""After its warm-up, over what was watched and as a trend per hour: more is a leak."""
FILES = 200
"""Open at once: more than all connections of a cluster of this size."""

_KINDS = {
    "ray::PrefillActor": "prefill worker",
    "ray::DecodeActor": "decode worker",
    "ray::SupervisorActor": "supervisor",
    "injection.process router": "router",
    "cluster.cli serve": "launcher",
}


def kind_of(title: str) -> str | None:
    """None: not a process of ours (Ray's)."""
    return next((kind for mark, kind in _KINDS.items() if mark in title), None)


@dataclass(frozen=True, slots=True)
class Sample:
    at_s: float
    rss_bytes: int
    files: int


@dataclass(slots=True)
class ProcessMemory:
    kind: str
    samples: list[Sample] = field(default_factory=list)

    @property
    def warm(self) -> list[Sample]:
        """Without its beginning."""
        return [sample for sample in self.samples if sample.at_s - self.samples[0].at_s >= WARM_UP_S]

    @property
    def is_telling(self) -> bool:
        warm = self.warm
        return len(warm) > 2 and warm[-1].at_s - warm[0].at_s >= LEAST_S

    @property
    def bytes_per_s(self) -> float:
        """Returns the trend, by least squares over what is warm."""
        warm = self.warm
        times_s, sizes = [sample.at_s for sample in warm], [sample.rss_bytes for sample in warm]
        return statistics.linear_regression(times_s, sizes).slope

    @property
    def grows(self) -> bool:
        """Returns whether the memory grows, by its trend, which a single burst is not."""
        warm = self.warm
        watched_s = warm[-1].at_s - warm[0].at_s
        return self.bytes_per_s * watched_s > GROWTH_BYTES and self.bytes_per_s * 3600 > GROWTH_BYTES


@dataclass(slots=True)
class Memory:
    processes: dict[int, ProcessMemory] = field(default_factory=dict)
    """Processes by their id."""

    def take(self, now_s: float, processes: Iterable[tuple[int, str, int, int]]) -> None:
        """Process id, title, resident bytes and open files of each that is alive."""
        for pid, title, rss_bytes, files in processes:
            kind = kind_of(title)
            if kind is not None and rss_bytes:
                process = self.processes.setdefault(pid, ProcessMemory(kind))
                process.samples.append(Sample(now_s, rss_bytes, files))

    def by_kind(self) -> dict[str, list[ProcessMemory]]:
        found: dict[str, list[ProcessMemory]] = {}
        for process in self.processes.values():
            found.setdefault(process.kind, []).append(process)
        return found

    def misses(self) -> list[str]:
        """Returns the processes that grow, in words."""
        growing = [
            f"a {process.kind} (process {pid}) grows by {process.bytes_per_s * 3600 / 2**20:.0f} MiB an hour"
            for pid, process in self.processes.items()
            if process.is_telling and process.grows
        ]
        crowded = [
            f"a {process.kind} (process {pid}) has {most} files open"
            for pid, process in self.processes.items()
            if (most := most_files([process])) > FILES
        ]
        return growing + crowded


def most_files(processes: Sequence[ProcessMemory]) -> int:
    return max((sample.files for process in processes for sample in process.samples), default=0)


def most_bytes(processes: Sequence[ProcessMemory]) -> int:
    return max((sample.rss_bytes for process in processes for sample in process.samples), default=0)
