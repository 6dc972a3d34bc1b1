"""Epochs that were seen to serve, and by whom: a worker has one at a time, and none comes back. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from twostroke.base.ids import Epoch


@dataclass(slots=True)
class Sightings:
    _latest: dict[tuple[str, str], Epoch] = field(default_factory=dict)
    """(who says it, worker) -> the latest epoch that was listed there."""
    problems: set[str] = field(default_factory=set)

    def see(self, source: str, listed: Iterable[tuple[str, str]]) -> None:
        """`listed`: workers with their epochs."""
        seen: set[str] = set()
        for worker, text in listed:
            if not text:
                continue
            if worker in seen:
                self.problems.add(f"{source} lists two epochs of {worker}")
            seen.add(worker)
            epoch = Epoch.parse(text)
            latest = self._latest.get((source, worker), epoch)
            if epoch < latest:
                self.problems.add(f"{source} lists epoch {epoch} of {worker} after {latest}")
            self._latest[source, worker] = max(epoch, latest)
