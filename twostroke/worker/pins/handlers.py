"""The work loop's events where a worker holds pins: those of pins' sequences go to the keeper, others to the role."""

from __future__ import annotations

from twostroke.base.errors import EngineLost
from twostroke.scheduler.batching import Step
from twostroke.scheduler.sequence import Sequence
from twostroke.scheduler.values import AdmittedSequence, Emission
from twostroke.worker.pins.keeper import PinKeeper
from twostroke.worker.role_host import RoleHandlers


class HandlersWithPins(RoleHandlers):
    def __init__(self, role: RoleHandlers, pins: PinKeeper) -> None:
        self._role = role
        self._pins = pins

    def admitted(self, admission: AdmittedSequence) -> None:
        if admission.sequence in self._pins.building:
            self._pins.began(admission)
        else:
            if self._pins.table.by_id:
                self._pins.found(admission.sequence)
            self._role.admitted(admission)

    def planning(self) -> None:
        if self._pins.building:
            self._pins.end_finished()
        self._role.planning()

    def preempted(self, sequence: Sequence) -> None:
        if sequence not in self._pins.building:  # a pin's sequence waits again, and that is all
            self._role.preempted(sequence)

    def computed(self, step: Step, seconds: float) -> None:
        self._role.computed(step, seconds)

    def emitted(self, emissions: list[Emission]) -> None:
        self._role.emitted(emissions)

    def failed(self, sequences: list[Sequence], error: Exception) -> None:
        self._role.failed([sequence for sequence in sequences if sequence not in self._pins.building], error)
        for sequence in [each for each in sequences if each in self._pins.building]:
            self._pins.failed(sequence, error)

    def lost(self, error: EngineLost) -> None:
        self._role.lost(error)
