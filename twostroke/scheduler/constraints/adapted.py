"""A sequence with an adapter: it begins once the adapter is loaded, and holds it while it has pages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from twostroke.request import WeightsRef
from twostroke.scheduler.batch import FeatureRows
from twostroke.scheduler.sequence import Constraint, Sequence


class AdapterGate(Protocol):
    """Decides when a sequence with an adapter may begin, and learns which sequences use which adapter."""

    def require(self, adapter: WeightsRef) -> bool:
        """Returns whether a step can use the adapter. If not, has it loaded, and is to be asked again after that."""

    def hold(self, sequence: Sequence, adapter: WeightsRef) -> None:
        """Keeps the adapter of a sequence that begins, until `release`."""

    def release(self, sequence: Sequence) -> None:
        """Releases the adapter that a sequence holds, if it holds one."""


class Adapted(Constraint):
    def __init__(self, adapter: WeightsRef, gate: AdapterGate) -> None:
        self.adapter = adapter
        self._gate = gate

    def may_begin(self, sequence: Sequence) -> bool:
        return self._gate.require(self.adapter)

    def began(self, sequence: Sequence) -> None:
        self._gate.hold(sequence, self.adapter)

    def fill(self, rows: FeatureRows, row: int, sequence: Sequence, tokens: range, proposed: tuple[int, ...]) -> None:
        rows.weights[row] = self.adapter.digest

    def releases(self, sequence: Sequence) -> None:
        self._gate.release(sequence)


def with_adapter(sequences: Iterable[Sequence], digest: bytes) -> list[Sequence]:
    """Returns the sequences that have the adapter of this digest."""
    return [
        each
        for each in sequences
        if any(
            isinstance(constraint, Adapted) and constraint.adapter.digest == digest for constraint in each.constraints
        )
    ]
